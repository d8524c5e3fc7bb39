"""Models: what connects published architectures to the two kinds of policies.

``base.py`` has the base classes of the recipe's sections, ``kinds.py`` lists the kinds, ``train.py`` has the sections that say
which weights train, and ``any_pipeline`` trains any pipeline of diffusers. Models with an adapter of their own are in
``retouch_models``. This package may import ``core``, ``config``, ``records``, ``types`` and ``protocols``; it knows no policy,
objective or reward.

From Python, every model has a short name here, for example ``retouch.models.SD3(path=...)``.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    for path in _class_paths():
        module, _, found = path.partition(":")
        if name in (found, found.removesuffix("Model")):
            return getattr(import_module(module), found)
    raise AttributeError(f"module 'retouch.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = [path.partition(":")[2] for path in _class_paths()]
    return sorted({*globals(), *names, *(name.removesuffix("Model") for name in names)})


def _class_paths() -> list[str]:
    kinds = import_module("retouch.models.kinds")
    return [*kinds.IMAGE_MODELS.paths.values(), *kinds.LANGUAGE_MODELS.paths.values()]
