"""Rewards that score text: text in the image, read by OCR, and text that a policy wrote. Modules here may import what other
rewards may, and torch only inside functions.
"""
