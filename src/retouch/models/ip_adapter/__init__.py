"""IP-Adapter (arXiv 2308.06721): attention to a reference image for Flux and Qwen-Image, files of its weights, and its section of a
recipe.

It may import ``models.train``, ``models.common`` and ``core``, and no family. Only ``section.py`` is imported when a recipe is
read."""
