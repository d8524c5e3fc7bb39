"""The wings: packages of this distribution whose commands, kinds, hooks and public names are added to ``retouch`` by entry points.

The core imports no wing. ``pyproject.toml`` lists what the wings add, each as ``SET.NAME``, for example ``command.view`` or
``reward.remote``.
"""

import functools
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

GROUP = "retouch.wings"


@functools.cache
def entries() -> Mapping[str, str]:
    """What the wings add: ``SET.NAME`` to ``module:object``, or to a module."""
    from importlib.metadata import distribution  # slow to import

    # Sorted, because installers keep no order and pages list the kinds.
    return dict(sorted((one.name, one.value) for one in distribution("retouch").entry_points if one.group == GROUP))


def of_set(name: str) -> dict[str, str]:
    """What the wings add to a set: name to ``module:object``."""
    return {key.removeprefix(f"{name}."): path for key, path in entries().items() if key.startswith(f"{name}.")}


def load(name: str) -> Any:
    """Import the object of an entry. Raises ValueError if no wing has it."""
    if name not in entries():
        raise ValueError(f"this installation of Retouch has no {name}; install the whole package again: pip install retouch")
    module, _, attribute = entries()[name].partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


def is_own(module: str) -> bool:
    """Whether a module, or the module of a class path, belongs to Retouch."""
    top = module.partition(":")[0].partition(".")[0]
    return top == "retouch" or (top.startswith("retouch_") and top in {path.partition(".")[0] for path in entries().values()})


def is_own_file(path: str) -> bool:
    """Whether a file belongs to the code of Retouch."""
    site = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    within = os.path.abspath(path).removeprefix(site + os.sep)
    return within != os.path.abspath(path) and is_own(within.partition(os.sep)[0])
