"""FLUX.1, FLUX.1-Fill and FLUX.1-Kontext: model classes for diffusers' pipelines, sections of a recipe and published
configurations.

It may import ``models.base``, ``models.common`` and what these may import. Only ``family.py`` is imported when a recipe is read.
"""
