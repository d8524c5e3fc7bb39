"""Emu3 (arXiv 2409.18869) as an image editor that reads and generates images as tokens: model, grammar, tokens, loading, and its
section of a recipe.

It may import ``models.language``, ``models.common`` and what these may import. Only ``family.py`` is imported when a recipe is
read."""
