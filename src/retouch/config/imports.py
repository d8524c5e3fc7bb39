"""Locates, imports and builds classes that are named as ``package.module:Class``.

A name that comes from a recipe is imported only after ``retouch.config.consent`` has allowed its module.

It also starts other Python interpreters (``python``, ``spawning``). They import no module from the current folder, which may be
somebody else's: Python puts it, or the folder of the script, first on the path of a new interpreter, so a file ``numpy.py`` there
would be imported in place of the package.
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from retouch.config import wings

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

    import torch

_imported: set[str] = set()
"""Top-level packages from which classes were imported, without this package."""
_SAFE, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"
CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to ``word``; None if none is similar."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: "; did you mean 'steps'?", or "" if no known word is similar."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def module_of(path: str) -> str:
    """The module of a class path."""
    return path.partition(":")[0]


def locate(module: str) -> str | None:
    """The file or folder of a module's top-level package, found without importing anything; None if there is no such module.

    The current folder is searched last, even if it is not on Python's path.
    """
    top = module.partition(".")[0]
    spec = _spec_on_path(top) or (None if top in sys.modules else PathFinder.find_spec(top, [os.getcwd()]))
    if spec is None:
        loaded = sys.modules.get(top)
        return None if loaded is None else str(getattr(loaded, "__file__", None) or f"{top}, in this process")
    if spec.submodule_search_locations:
        return str(next(iter(spec.submodule_search_locations)))
    return spec.origin or top


def is_user_error(error: BaseException) -> bool:
    """Whether this package raised a ValueError itself, and not a library in it: then the message is written for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and wings.is_own(str(frames[-1].f_globals.get("__name__", "")))


def is_foreign(made: object) -> bool:
    """Whether the object is of code from outside this package, or calls a function of such code."""
    return getattr(made, "kind", None) == "function" or not wings.is_own(type(made).__module__)


def user_code_error(error: BaseException, what: str) -> ValueError | None:
    """The message for the user about an error that their own code raised in ``what`` (an import, a call), with its file and line.

    None if ``error`` is to be raised unchanged: that code did not cause it (Ctrl-C, full memory), or it is already a message.
    """
    # Python raises KeyboardInterrupt for a signal only in the main thread.
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        return None
    made_by = type(error).__module__
    # Classes of Retouch and of torch mean stopped runs and full devices, which the calling code did not cause.
    if isinstance(error, MemoryError) or wings.is_own(made_by) or made_by.partition(".")[0] == "torch":
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames and wings.is_own_file(frames[-1].filename):
        return None
    own = [frame for frame in frames if not is_library(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    elif own or frames:
        frame = (own or frames)[-1]
        place = f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    else:
        place = "no line is known"
    return ValueError(f"{what} raised {type(error).__name__}: {error}\n  {place}")


def imported_code_error(error: BaseException) -> ValueError | None:
    """The message for the user about an error that an imported class, or a library that it called, raised; None if this package or
    a library that it called raised the error."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    known = [name for name in names if wings.is_own(name) or name.partition(".")[0] in _imported]
    if not known or wings.is_own(known[-1]):
        return None
    return user_code_error(error, known[-1])


def import_class(path: str) -> type:
    """Import the class of that name. Raises ValueError if there is no such module, if it has no such class (with the nearest name),
    or if the module fails, with the file and line.

    A module in the current folder is found too; the folder is then put at the end of Python's path, so that the module can import
    other modules of this folder.
    """
    module_name, _, name = path.partition(":")
    top = module_name.partition(".")[0]
    if _spec_on_path(top) is None and top not in sys.modules and PathFinder.find_spec(top, [os.getcwd()]) is not None:
        sys.path.append(os.getcwd())
    if not _exists(module_name):
        raise ValueError(f"{path}: there is no module {module_name}; install it, or put its folder on PYTHONPATH")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        wrong = None if wings.is_own(top) else user_code_error(error, f"importing {module_name}")
        if wrong is None:
            raise
        raise wrong from error
    if not wings.is_own(top):
        _imported.add(top)
    found = vars(module).get(name)
    if not isinstance(found, type):
        raise _absent(path, module, {"class": type})
    return found


def _absent(path: str, module: ModuleType, wanted: Mapping[str, type]) -> ValueError:
    """The error for a name that ``module`` does not define. ``wanted``: what the name may refer to, and its type."""
    module_name, _, name = path.partition(":")
    near = nearest(name, [known for known, value in vars(module).items() if isinstance(value, tuple(wanted.values()))])
    hint = f"; did you mean {near}?" if near else ""
    if module_name == "__main__":
        hint = f"; __main__ is the program that runs, so save the class in a file mine.py and name it mine:{name}"
    return ValueError(f"{path}: {module_name} has no {' or '.join(wanted)} {name}{hint}")


def import_function(path: str) -> FunctionType | None:
    """Import the function of that name; None if it is a class. Raises ValueError as ``import_class`` does."""
    try:
        import_class(path)
    except ValueError:
        module_name, _, name = path.partition(":")
        module = sys.modules.get(module_name)
        found = getattr(module, name, None)
        if module is not None and found is None:
            raise _absent(path, module, {"class": type, "function": FunctionType}) from None
        if not isinstance(found, FunctionType):
            raise
        return found
    return None


def build_class(path: str, args: Mapping[str, Any], *, device: "torch.device", what: str, members: Collection[str]) -> Any:
    """Build an object of the class of that name with ``args``; also with ``device``, if the constructor takes it and ``args`` does
    not contain it.

    ``members``: names that the class or a base class must define or annotate to be a ``what``. Raises ValueError if one is missing,
    or if ``args`` do not fit the constructor; then nothing is called.
    """
    wanted = import_class(path)
    # `getattr` would find `__call__` on every class, because classes are callable through their metaclass.
    bases = [vars(base) for base in wanted.__mro__ if base is not object]
    missing = [name for name in members if not any(name in own or name in own.get("__annotations__", {}) for own in bases)]
    if missing:
        raise ValueError(
            f"{path} is no {what}: its class has no {', '.join(missing)}. Define them; if the constructor sets an attribute, "
            "annotate it in the class"
        )
    if wrong_args := [f"{path}: args.{name}: {problem}" for name, problem in argument_problems(wanted, args)]:
        raise ValueError("\n".join(wrong_args))
    takes = "device" in inspect.signature(wanted).parameters
    try:
        return wanted(**args, **({"device": device} if takes and "device" not in args else {}))
    except BaseException as error:
        wrong = user_code_error(error, f"{path}: its constructor")
        if wrong is None:
            raise
        raise wrong from error


def source_place(made: Any) -> str:
    """The file and line of a class or function, in parentheses after a space; empty if they are not known."""
    try:
        return f" ({inspect.getsourcefile(made)}:{inspect.getsourcelines(made)[1]})"
    except (OSError, TypeError):
        return ""


def argument_problems(wanted: type, args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each argument that the constructor does not take or that it needs in addition, and what is wrong with it.
    ``device`` may be missing, because ``build_class`` gives it."""
    try:
        parameters = inspect.signature(wanted).parameters.values()
    except (ValueError, TypeError):  # a class that is not written in Python may have no signature
        return
    takes = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = [each.name for each in takes]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for name in args:
            if name not in names:
                accepted = ", ".join(names) or "no arguments"
                yield name, f"unknown argument; the constructor takes {accepted}{did_you_mean(name, names)}"
    for each in takes:
        if each.default is each.empty and each.name not in (*args, "device"):
            yield each.name, "missing; the constructor needs this argument"


def methods_of(protocol: type) -> list[str]:
    """The names of a protocol's own public methods."""
    return [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]


def is_library(file: str) -> bool:
    """Whether a file of code belongs to Python, to this package or to an installed package. Text without a file counts too."""
    standard = os.path.abspath(file).startswith(os.path.dirname(os.__file__) + os.sep)
    return file.startswith("<") or "-packages" in file or standard or wings.is_own_file(file)


def _spec_on_path(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module that was loaded without a spec, like __main__
        return None


def _exists(module_name: str) -> bool:
    if module_name in sys.modules:
        return True
    parts = module_name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:depth]))
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return False
    return True


def python(*words: str) -> list[str]:
    """Return the command line of another interpreter of this environment. Give it ``environment()`` as its environment."""
    return [sys.executable, "-P", *words]


def environment() -> dict[str, str]:
    """Return this process's environment for a child: neither the child nor the interpreters that it starts import from the current
    folder, also if PYTHONPATH has an empty entry or ``.``. Other entries of PYTHONPATH stay."""
    found = dict(os.environ)
    protect(found)
    return found


def protect(variables: MutableMapping[str, str]) -> None:
    """Change an environment as ``environment`` does."""
    variables[_SAFE] = "1"
    if _PATH in variables:
        kept = [entry for entry in variables[_PATH].split(os.pathsep) if os.path.normpath(entry) != "."]
        variables[_PATH] = os.pathsep.join(kept)
        if not kept:
            del variables[_PATH]


@contextmanager
def spawning() -> Iterator["SpawnContext"]:
    """Yield the context for processes that do not inherit this process's memory; start and use them within the block."""
    import multiprocessing

    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in (_SAFE, _PATH)}
    protect(os.environ)
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
