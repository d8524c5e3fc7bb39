"""Recipes that differ from others: documents with changes, and what is said of them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from retouch.recipe.document import apply
from retouch.recipe.recipe import load, parse


def changed(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The base document with dotted keys (``__`` for the dot) set."""
    return apply(base, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def refusal(base: Mapping[str, Any], **changes: Any) -> list[str]:
    """The lines of the error about the changed document."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse(changed(base, **changes))
    return str(caught.value).splitlines()


def values(document: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a document by its path."""
    if isinstance(document, dict):
        return {path: value for key, inner in document.items() for path, value in values(inner, f"{prefix}{key}.").items()}
    if isinstance(document, list) and any(isinstance(entry, dict) for entry in document):
        return values(dict(enumerate(document)), prefix)
    return {prefix.removesuffix("."): document}


def different(one: str, other: str) -> set[str]:
    """The paths at which two recipes differ."""
    first, second = (values(load(name).document()) for name in (one, other))
    return {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)}
