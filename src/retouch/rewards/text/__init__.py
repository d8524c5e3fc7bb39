"""Rewards that score text: text in the image, read by OCR, and text that a policy wrote. One file per reward, and the OCR readers.

May import ``rewards.base``, ``rewards.facts``, ``rewards.identity`` and ``core.answers``; torch only inside functions.
"""
