"""Rewards: they map samples to named scores, and combine the scores into the number that the policy is trained on.

``base.py`` has the base class of all rewards, ``kinds.py`` the table of the kinds that a recipe can name, and ``judging.py`` scores
the batches of a run. A package may import ``config``, ``core``, ``types`` and ``protocols``, and no other part of a run: no data,
model, policy or renderer.

In Python, each reward class has a short name in this package, for example ``retouch.rewards.PickScore()``. ``load`` makes a reward
that scores lists of images.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name == "load":
        return import_module("retouch.rewards.loading").load
    for path in import_module("retouch.rewards.parts").PARTS.paths.values():
        module, _, found = path.partition(":")
        if name in (found, found.removesuffix("Reward")):
            return getattr(import_module(module), found)
    raise AttributeError(f"module 'retouch.rewards' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = [path.partition(":")[2] for path in import_module("retouch.rewards.parts").PARTS.paths.values()]
    return sorted({*globals(), "load", *names, *(name.removesuffix("Reward") for name in names)})
