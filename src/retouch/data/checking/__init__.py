"""Checks of data before a run: rows against what the run requires, every row and image in several processes, the stored result of a
check, and the guard against training on known test sets.

Modules here import the modules of ``retouch.data`` for rows and images. ``guard.py`` and ``requirements.py`` are imported while a
recipe is parsed, so they import no torch.
"""
