"""Qwen-Image (arXiv 2508.02324), Qwen-Image-Edit and Qwen-Image-Edit-Plus: model classes for diffusers' pipelines, conditioning on
a writer's responses, sections of a recipe and published configurations.

It may import ``models.base``, ``models.common``, ``models.qwen_vl`` and what these may import. Only ``family.py`` is imported when
a recipe is read."""
