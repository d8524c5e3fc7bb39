"""Builds the playground's base models from a seed (``retouch playground build``): one ``build_*.py`` for each group of weights, the
supervised training they share, and in ``networks/`` the small models themselves. May import every layer below ``cli``.
"""
