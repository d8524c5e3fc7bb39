"""Which code a recipe may import: only modules that the user has named.

A recipe names classes with ``kind: 'import'``, and importing a module runs its code. Recipes and run folders come from other people
too, so nothing is imported because a recipe says so. A module is allowed if

* the user names it: ``--allow-import my_module``, the environment variable RETOUCH_ALLOW_IMPORTS (names with commas between them),
  ``allow_imports=`` in Python, or the class itself on the command line (``--set``, or as the reward of ``retouch score``);
* the user has agreed when a command asked on a terminal, or has trained with exactly this recipe before: both are remembered by
  the recipe's hash, together with the path of the module's file at that time;
* an installed package declares exactly this class as an entry point of the group ``retouch.plugins``.

Retouch's own classes are allowed if they have a kind, or if their ``Kinds`` names them. Neither the content of a recipe's file nor
the folder that a module is in counts as consent.

Data files that a recipe names are sent to the judges that it names, so links may not lead out of the folders that the user has
given (``data_path``).
"""

import functools
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.config import wings
from retouch.config.imports import CLASS_PATH, locate, module_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VARIABLE = "RETOUCH_ALLOW_IMPORTS"
DATA_VARIABLE = "RETOUCH_DATA_ROOTS"
GROUP = "retouch.plugins"
IMPORT = "import"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_reading: ContextVar[frozenset[str]] = ContextVar("retouch_imports_of_this_recipe", default=frozenset())
_command: ContextVar[bool] = ContextVar("retouch_imports_of_this_command", default=False)


def allowed() -> frozenset[str]:
    """The modules that may be imported at this moment: those in RETOUCH_ALLOW_IMPORTS, and of the recipe that is being read."""
    return frozenset(module_names([os.environ.get(VARIABLE, "")])) | _reading.get()


def allows(names: frozenset[str], module: str) -> bool:
    """Whether ``names`` contain the module or a package that contains it."""
    return any(part in names for part in accumulate(module.split("."), "{}.{}".format))


def module_names(words: Iterable[str]) -> list[str]:
    """The modules in words like "my_rewards,my_models". Raises ValueError for a word that is not a module's name."""
    names = [name for word in words for name in word.replace(",", " ").split()]
    for name in names:
        if not _MODULE.fullmatch(name):
            raise ValueError(
                f"--allow-import or {VARIABLE}: {name!r} is not the name of a module; write it as in Python's `import`, for "
                "example my_package.rewards"
            )
    return names


def require(path: str, *, own: Container[str] = ()) -> None:
    """Raise ValueError unless the module of this class may be imported. ``own``: classes of Retouch that recipes may name."""
    module = module_of(path)
    if path in own or allows(allowed(), module) or path in {entry.value for entry in plugins()}:
        return
    if wings.is_own(path):
        raise ValueError(f"{path} is not a class of Retouch that a recipe can name; docs/recipes.md lists the kinds")
    _require_found(path)
    raise ValueError(_refusal([("", path)]))


def plugins() -> "list[EntryPoint]":
    """The entry points ``retouch.plugins`` of installed packages, the first on Python's path first.

    Packages in the current folder do not count as installed: a folder from somebody else could declare anything.
    """
    path = [entry for entry in sys.path if Path(entry).resolve() != Path.cwd() and os.path.exists(entry)]
    return list(_plugins_on(tuple((entry, os.stat(entry).st_mtime_ns) for entry in path)))


@functools.lru_cache(maxsize=4)
def _plugins_on(path: "tuple[tuple[str, int], ...]") -> "tuple[EntryPoint, ...]":
    """``plugins`` of these folders, each with the time of its last change: an error message asks for them dozens of times."""
    from importlib.metadata import distributions  # slow to import

    there = distributions(path=[folder for folder, _ in path])
    return tuple(entry for found in there for entry in found.entry_points if entry.group == GROUP)


@contextmanager
def allowing(modules: Iterable[str], *, ask: bool = False) -> Iterator[None]:
    """Allow these modules within the block, in this process and in those that it starts.

    ``ask``: the block is a command, which may ask its user for further modules if it has a terminal.
    """
    before, asked = os.environ.get(VARIABLE), _command.get()
    _command.set(ask)
    try:
        _allow_here(module_names(modules))
        yield
    finally:
        _command.set(asked)
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


@contextmanager
def reading(document: object, *, source: object = None, allow: Iterable[str] = ()) -> Iterator[None]:
    """Within the block, ``document`` may import its classes.

    ``source``: the document before changes from the command line, if there are any; consent is remembered for it. ``allow``:
    further modules that are allowed. Raises ValueError, with all classes and advice, if a module is not allowed.
    """
    source = document if source is None else source
    outer = _reading.set(_reading.get() | frozenset(allow))
    try:
        here = allowed()
        # ``require`` checks Retouch's own classes, because it knows which of them have a kind.
        unknown = [one for one in classes_named(document) if not wings.is_own(one[1]) and not allows(here, module_of(one[1]))]
        declared = {entry.value for entry in plugins()} if unknown else set()
        missing = [(key, path) for key, path in unknown if path not in declared]
        for key, path in missing:
            _require_found(path, key)
        if missing:
            names = sorted({module_of(path) for _, path in missing})
            if not _remembers(source, names):
                if not _confirmed(missing):
                    raise ValueError(_refusal(missing))
                _remember(source, names)
            _reading.set(_reading.get() | frozenset(names))
            if _command.get():
                _allow_here(names)
        yield
    finally:
        _reading.reset(outer)


def data_path(name: str | Path) -> Path:
    """The path of a file or folder of data, with all links resolved.

    For a relative name, links may lead to any place in the current folder. For an absolute name, or one with "..", the folder is as
    it is named, and a file may be a link within its folder. Everywhere, links may lead into the folders in RETOUCH_DATA_ROOTS
    (separated by colons), and from a snapshot of the Hub's cache to its blobs. Raises ValueError for other links.
    """
    path = Path(name)
    relative = not path.is_absolute() and ".." not in path.parts
    if not relative and path.is_dir():
        return path.resolve()
    return _within(path, Path() if relative else path.parent)


def require_no_links_out(folder: Path) -> None:
    """Raise ValueError for a folder of data that contains a link which leads out of it, except as in ``data_path``."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink():
                _within(path, folder)


def _within(path: Path, root: Path) -> Path:
    """The real path of ``path``. Raises ValueError if it is neither in ``root`` nor in another folder that ``data_path`` allows."""
    real, named = Path(os.path.realpath(path)), Path(os.path.abspath(path))
    roots = [root.resolve(), *(Path(each).resolve() for each in os.environ.get(DATA_VARIABLE, "").split(os.pathsep) if each)]
    if "snapshots" in named.parts:  # REPOSITORY/snapshots/COMMIT/FILE links to REPOSITORY/blobs/HASH
        roots.append(Path(*named.parts[: named.parts.index("snapshots")]).resolve() / "blobs")
    if not any(real.is_relative_to(each) for each in roots):
        name, target, folder = (_printable(str(each)) for each in (path, real, real.parent))
        raise ValueError(
            f"{name}: a link leads out of its folder, to {target}, which is not read; name the real path, copy the file, or allow "
            f"its folder if you trust the recipe: {DATA_VARIABLE}={folder}"
        )
    return real


def user_folder(variable: str, default: str) -> Path | None:
    """Retouch's folder for this user: below the XDG ``variable``, otherwise below ``default`` in the home folder.

    None without a home folder. Relative paths are ignored: they would be below the current folder, which may be somebody else's.
    """
    for folder in (os.environ.get(variable, ""), os.path.join(os.path.expanduser("~"), default)):
        if os.path.isabs(folder):
            return Path(folder) / "retouch"
    return None


def remember(document: object) -> None:
    """Remember that the user has imported the classes that this recipe names, so that its run can be opened without further
    consent."""
    names = sorted({module_of(path) for _, path in classes_named(document)})
    if names:
        _remember(document, names)


def named_in_words(words: Iterable[str], value_of: Callable[[str], Any]) -> list[str]:
    """The modules of classes that the user typed: in overrides ``a.b=value`` of a recipe, or in JSON.

    ``value_of``: converts the text of a value to the value.
    """
    found = []
    for word in words:
        key, _, text = word.partition("=")
        value = value_of(text)
        if key.endswith(".class") and isinstance(value, str):
            found.append(value)
        found += [path for _, path in classes_named(value)]
    return [module_of(path) for path in found if CLASS_PATH.fullmatch(path)]


def classes_named(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """The class of each ``kind: 'import'`` in a document, with the path of its key."""
    if isinstance(value, Mapping):
        named = value.get("class")
        if value.get("kind") == IMPORT and isinstance(named, str) and CLASS_PATH.fullmatch(named):
            yield f"{path}.class".removeprefix("."), named
        for key, inner in value.items():
            yield from classes_named(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from classes_named(inner, f"{path}.{index}")


def _require_found(path: str, key: str = "") -> None:
    module = module_of(path)
    if locate(module) is None:
        where = f"{key}: " if key else ""
        raise ValueError(f"{where}{path}: there is no module {module}; install it, or put its folder on PYTHONPATH")


def _refusal(missing: Sequence[tuple[str, str]]) -> str:
    names = sorted({module_of(path) for _, path in missing})
    lines = [
        f"{_printable(key)}{': ' if key else ''}{path} is code from outside Retouch, in {_printable(locate(module_of(path)))}; "
        "a recipe may import only modules that you have named"
        for key, path in missing
    ]
    flags = " ".join(f"--allow-import {name}" for name in names)
    lines.append(f"if you trust the code, add {flags}, or set {VARIABLE}={','.join(names)} (in Python: allow_imports={names})")
    return "\n".join(lines)


def _printable(text: str | None) -> str:
    """The text without control characters, which could hide it on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text or "")


def _confirmed(missing: Sequence[tuple[str, str]]) -> bool:
    """The user's answer; False without a terminal, and outside of a command."""
    if not _command.get() or "RANK" in os.environ or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write("This recipe runs code from outside Retouch:\n")
    for key, path in missing:
        sys.stderr.write(f"  {_printable(key)}: {path}, in {_printable(locate(module_of(path)))}\n")
    sys.stderr.write("Run it, now and whenever this recipe is used? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _allow_here(names: Iterable[str]) -> None:
    known = module_names([os.environ.get(VARIABLE, "")])
    if together := dict.fromkeys([*known, *names]):
        os.environ[VARIABLE] = ",".join(together)


def _remembers(document: object, names: Iterable[str]) -> bool:
    """Whether the user has agreed to these modules for this recipe, and each module still has the same path."""
    file = _memory(document)
    if file is None or not file.is_file():
        return False
    try:
        known = json.loads(file.read_text(encoding="utf-8"))["modules"]
        return all(known.get(name) is not None and known[name] == locate(name) for name in names)
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        raise ValueError(f"{file} cannot be read; remove it, and you will be asked again") from None


def _remember(document: object, names: Iterable[str]) -> None:
    """Store the user's consent. If the folder is not writable, nothing is stored, and the user is asked again."""
    file = _memory(document)
    if file is None:
        return
    text = json.dumps({"modules": {name: locate(name) for name in names}}, indent=1)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as made:
            made.write(text)
        os.replace(made.name, file)


def _memory(document: object) -> Path | None:
    """The file that stores the user's consent for this document; None if the user has no folder for it."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    state = user_folder("XDG_STATE_HOME", ".local/state")
    return None if state is None else state / "consent" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
