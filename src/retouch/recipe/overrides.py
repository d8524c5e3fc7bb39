"""Changes to a recipe from the command line: ``a.b=value``, the value JSON where it is JSON, else text."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any


def apply(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The document with each ``path=value`` set in turn; entries of a list by number (``phases.0.steps=3``).

    Whether the recipe has such a key is for the schema to say. ValueError: no ``=``, no such entry of a list, or a key below a
    plain value.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"--set {override}: write it as --set some.key=value")
        _set(changed, keys, value_of(text), override)
    return changed


def value_of(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        # Python's reader takes NaN and Infinity for numbers; JSON has no such values, so they stay text.
        return json.loads(text, parse_constant=str)
    except json.JSONDecodeError:
        return text


def _set(node: Any, keys: Sequence[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        here = ".".join(keys[:depth])
        if isinstance(node, list):
            place: Any = _index(node, key, f"--set {override}: {here}")
        elif isinstance(node, dict):
            place = key
        else:
            raise ValueError(f"--set {override}: {here} is {json.dumps(node)}, which has no keys")
        if depth == len(keys) - 1:
            node[place] = value
        else:
            if isinstance(node, dict) and node.get(place) is None:
                node[place] = {}
            node = node[place]


def _index(entries: Sequence[Any], key: str, where: str) -> int:
    if not key.isdecimal() or int(key) >= len(entries):
        legal = f"0 to {len(entries) - 1}" if entries else "none: it is empty"
        raise ValueError(f"{where} is a list, and {key!r} is none of its entries ({legal})")
    return int(key)
