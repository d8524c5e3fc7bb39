"""Recipe documents with changed keys, the error messages that they raise, and the differences between two recipes."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from retouch.recipe.document import apply
from retouch.recipe.recipe import load, parse


def changed(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the base document with these keys changed; ``__`` in a keyword is replaced by the dot of a path."""
    return apply(base, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def raised(base: Mapping[str, Any], **changes: Any) -> list[str]:
    """Return the lines of the error that the changed document raises."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse(changed(base, **changes))
    return str(caught.value).splitlines()


def values(document: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values of a document by their paths."""
    if isinstance(document, dict):
        return {path: value for key, inner in document.items() for path, value in values(inner, f"{prefix}{key}.").items()}
    if isinstance(document, list) and any(isinstance(entry, dict) for entry in document):
        return values(dict(enumerate(document)), prefix)
    return {prefix.removesuffix("."): document}


def differing_paths(one: str, other: str) -> set[str]:
    """Return the paths at which two recipes differ."""
    first, second = (values(load(name).document()) for name in (one, other))
    return {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)}
