"""Rewards: from samples to named scores, and from scores to the number that trains.

``base.py`` is the class of all rewards, ``kinds.py`` the table of those that a recipe can name; ``judging.py`` scores the batches
of a run. A package may import ``config``, ``core``, ``types`` and ``protocols``, and no other part of a run: no data, model, policy
or renderer.
"""
