"""Builds the playground's base models from a seed (``retouch playground build``): one ``build_*.py`` for each group of weights, the
supervised training that they share, and the small models themselves in ``networks/``. It may import every layer below ``cli``.
"""
