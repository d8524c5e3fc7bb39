"""Classes named as ``package.module:Class``, and the nearest known name to a mistyped one."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to this one, if any is similar."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def import_class(path: str) -> type:
    """The class of that name. ValueError: no such module, or no such class in it (and which comes nearest).

    What goes wrong inside the module is its own error and is left as it is.
    """
    module_name, _, name = path.partition(":")
    if not _exists(module_name):
        raise ValueError(f"{path}: there is no module {module_name}; install it, or put its folder on PYTHONPATH")
    module = importlib.import_module(module_name)
    found = vars(module).get(name)
    if not isinstance(found, type):
        near = nearest(name, [known for known, value in vars(module).items() if isinstance(value, type)])
        raise ValueError(f"{path}: {module_name} has no class {name}{f'; did you mean {near}?' if near else ''}")
    return found


def build_class(path: str, args: Mapping[str, Any], *, device: "torch.device") -> Any:
    """One of the class of that name, made with ``args``; and with ``device``, where its constructor takes one and ``args`` names
    none."""
    wanted = import_class(path)
    takes = "device" in inspect.signature(wanted).parameters
    return wanted(**args, **({"device": device} if takes and "device" not in args else {}))


def _exists(module_name: str) -> bool:
    parts = module_name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:depth]))
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return False
    return True
