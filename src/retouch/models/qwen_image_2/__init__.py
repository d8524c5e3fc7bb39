"""Qwen-Image-2.1: its model class, its section of a recipe and its published configuration.

It may import ``models.base``, ``models.common`` and what these may import. Only ``family.py`` is imported when a recipe is read.
"""
