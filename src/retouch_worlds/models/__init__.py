"""Tiny models of published families: those whose weights are packaged (``family.py``, ``language.py``), and untrained ones
(``tiny_sd3.py``, ``tiny_fill.py``), with which a recipe can be tried without a download.

It may import other families, ``models.common`` and ``playground``. Only the sections of the packaged models are imported when a
recipe is read.
"""
