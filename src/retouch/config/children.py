"""Starts other Python interpreters. They import no module from the current folder, which may be somebody else's.

Python puts the current folder, or the folder of the script, first on the path of a new interpreter, so a file ``numpy.py`` there
would be imported in place of the package.
"""

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

_SAFE, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"


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
