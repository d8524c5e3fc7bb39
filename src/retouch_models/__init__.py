"""The published models with an adapter of their own: denoisers that can do more than any pipeline, and language models.

An image model is a folder: its ``__init__.py`` has the recipe's sections, without torch, and ``model.py`` the code. The sections
of all language models are in ``language.py``. May import ``retouch`` up to its ``inference``; it knows no objective and no reward.
From Python, every model has a short name in ``retouch.models``, for example ``retouch.models.SD3(path=...)``.
"""
