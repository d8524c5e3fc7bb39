"""Objects that exist only in this Python process, such as a function or a loaded pipeline, as parts of a recipe.

A section that stands for such an object contains the name and the identity of the object; the object itself is in a table that is
active while a run is built. So a recipe stays plain JSON, also in the folder of a run that was started from Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LIVE = "python:"
"""Prefix of the name of a loaded model, which stands in place of a path in a recipe."""

_ACTIVE: ContextVar[Mapping[str, Any] | None] = ContextVar("live_objects", default=None)


@contextmanager
def live_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let sections find these objects by their names inside the block."""
    token = _ACTIVE.set(objects)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def live_object(name: str, *, key: str) -> Any:
    """The object of this name.

    ``key``: the recipe's key, for the message. Raises ValueError if the object is not in this process: the recipe was written by a
    run that was started from Python, and has to be opened in the same way.
    """
    try:
        return (_ACTIVE.get() or {})[name]
    except KeyError:
        raise ValueError(
            f"{key}: {name} is a Python object of the script that started this run; run that script again, with "
            "retouch.Trainer(...), or name a class or a path in its place"
        ) from None
