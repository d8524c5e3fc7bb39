"""Classes named as ``package.module:Class``: where their modules are, and importing and building them.

A name that comes from a recipe is imported only after ``retouch.config.consent`` has allowed its module.
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to this one, if any is similar."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def module_of(path: str) -> str:
    """The module of a class path."""
    return path.partition(":")[0]


def locate(module: str) -> str | None:
    """The file or folder of a module's top-level package, found without importing anything; None: there is no such module.

    The current folder is searched last, also if it is not on Python's path.
    """
    top = module.partition(".")[0]
    spec = _top_level_spec(top)
    if spec is None:
        loaded = sys.modules.get(top)
        return None if loaded is None else str(getattr(loaded, "__file__", None) or f"{top}, in this process")
    if spec.submodule_search_locations:
        return str(next(iter(spec.submodule_search_locations)))
    return spec.origin or top


def import_class(path: str) -> type:
    """The class of that name. ValueError: no such module, or no such class in it (and which comes nearest).

    A module in the current folder is found too; the folder is then put at the end of Python's path, so that the module can import
    others beside it. What goes wrong inside the module is its own error and is left as it is.
    """
    module_name, _, name = path.partition(":")
    top = module_name.partition(".")[0]
    if _spec_on_path(top) is None and top not in sys.modules and _spec_in_current_folder(top) is not None:
        sys.path.append(os.getcwd())
    if not _exists(module_name):
        raise ValueError(f"{path}: there is no module {module_name}; install it, or put its folder on PYTHONPATH")
    module = importlib.import_module(module_name)
    found = vars(module).get(name)
    if not isinstance(found, type):
        near = nearest(name, [known for known, value in vars(module).items() if isinstance(value, type)])
        raise ValueError(f"{path}: {module_name} has no class {name}{f'; did you mean {near}?' if near else ''}")
    return found


def build_class(path: str, args: Mapping[str, Any], *, device: "torch.device", what: str, members: Collection[str]) -> Any:
    """One of the class of that name, made with ``args``; and with ``device``, where its constructor takes one and ``args`` names
    none.

    ``members``: what the class must define or annotate, itself or in a base class, so that it is a ``what``. Raises ValueError if
    one is missing; nothing is called then.
    """
    wanted = import_class(path)
    missing = [name for name in members if not _defines(wanted, name)]
    if missing:
        raise ValueError(
            f"{path} is no {what}: its class has no {', '.join(missing)}. Declare an attribute that the constructor sets with an "
            "annotation in the class"
        )
    takes = "device" in inspect.signature(wanted).parameters
    return wanted(**args, **({"device": device} if takes and "device" not in args else {}))


def methods_of(protocol: type) -> list[str]:
    """The names of a protocol's own public methods."""
    return [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]


def _defines(wanted: type, name: str) -> bool:
    """Whether the class or a base of it has the attribute or an annotation of it. Every class could be called through its
    metaclass, so ``getattr`` would find a ``__call__`` on all of them."""
    bases = [base for base in wanted.__mro__ if base is not object]
    return any(name in vars(base) or name in vars(base).get("__annotations__", {}) for base in bases)


def _top_level_spec(top: str) -> ModuleSpec | None:
    return _spec_on_path(top) or (None if top in sys.modules else _spec_in_current_folder(top))


def _spec_on_path(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module that was loaded without one, like __main__
        return None


def _spec_in_current_folder(top: str) -> ModuleSpec | None:
    return PathFinder.find_spec(top, [os.getcwd()])


def _exists(module_name: str) -> bool:
    if module_name in sys.modules:
        return True
    parts = module_name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:depth]))
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return False
    return True
