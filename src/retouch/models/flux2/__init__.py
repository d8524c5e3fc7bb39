"""FLUX.2-klein: its model class, its section of a recipe and its published configurations.

It may import ``models.base``, ``models.common`` and what these may import. Only ``family.py`` is imported when a recipe is read.
"""
