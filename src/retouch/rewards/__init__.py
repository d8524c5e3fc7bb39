"""Rewards: from samples to named scores, and from scores to the number that trains.

``base.py`` is the class of all rewards, ``kinds.py`` the table of those that a recipe can name; ``judging.py`` scores the batches
of a run. A package may import ``config``, ``core``, ``types`` and ``protocols``, and no other part of a run: no data, model, policy
or renderer.

From Python, every reward has a short name here, for example ``retouch.rewards.PickScore()``, and ``load`` makes one that scores
lists of images.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name == "load":
        return import_module("retouch.rewards.loading").load
    for path in import_module("retouch.rewards.parts").SINGLE.values():
        module, _, found = path.partition(":")
        if name in (found, found.removesuffix("Reward")):
            return getattr(import_module(module), found)
    raise AttributeError(f"module 'retouch.rewards' has no attribute {name!r}")
