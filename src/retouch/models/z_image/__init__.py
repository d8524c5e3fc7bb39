"""Z-Image (arXiv 2511.22699): the model class for diffusers' pipeline, its section of a recipe and published configurations.

It may import ``models.base``, ``models.common`` and what these may import. Only ``family.py`` is imported when a recipe is read.
"""
