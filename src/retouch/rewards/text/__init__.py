"""Rewards about text: text in the image, read by OCR, and the text that a policy wrote. One file a reward; readers beside them.

May import ``rewards.base``, ``rewards.facts``, ``rewards.identity`` and ``core.answers``; torch only inside functions.
"""
