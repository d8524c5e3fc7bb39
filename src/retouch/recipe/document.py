"""Reads a file as a JSON document: evaluates Jsonnet, applies ``a.b=value`` overrides, and refuses secrets of the environment.

A recipe can read only those environment variables whose names begin with ``APP__``, through ``std.extVar``.
"""

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retouch.config.keys import secrets
from retouch.config.packaged import packaged_recipes
from retouch.recipe.jsonnet import JsonnetError, evaluate_jsonnet

PREFIX = "APP__"
_UNDEFINED = re.compile(r"external variable is not defined: (\w+)")
_MEANING = re.compile(r"^\s*// (\w+__\w+): (.+)$", re.MULTILINE)


def evaluate(file: Path) -> dict[str, Any]:
    """Evaluate a Jsonnet (or JSON) file to an object. Imports are searched next to the file, then among the packaged recipes.

    Raises ValueError if the file cannot be evaluated, or does not describe an object.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    try:
        document = json.loads(evaluate_jsonnet(file, folders=[packaged_recipes()], variables=variables))
    except JsonnetError as error:
        missing = _missing_variables(file, variables, str(error))
        raise ValueError("\n".join(missing) if missing else str(error)) from None
    except RecursionError:
        raise ValueError("the recipe is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("a recipe is an object with keys: { name: 'mine', ... }")
    return document


def _missing_variables(file: Path, variables: Mapping[str, str], error: str) -> list[str]:
    """A line for each environment variable that a recipe reads and that is not set; empty if ``error`` has another cause.

    The meaning of a variable is in a comment of the recipe, or of a library that comes with the package: ``// APP__NAME: meaning``.
    """
    missing: dict[str, str] = {}
    while (found := _UNDEFINED.search(error)) and found[1] not in missing:
        missing[found[1]] = ""
        try:
            evaluate_jsonnet(file, folders=[packaged_recipes()], variables={**variables, **missing})
            error = ""
        except JsonnetError as another:
            error = str(another)
    if not missing:
        return []
    texts = [each.read_text(encoding="utf-8") for each in (file, *(packaged_recipes() / "lib").glob("*.libsonnet"))]
    meanings = {name: meaning for text in texts for name, meaning in _MEANING.findall(text)}
    lines = [f"  {name}: {meanings.get(name, 'the recipe has no comment about it')}" for name in missing]
    foreign = any(not name.startswith(PREFIX) for name in missing)
    return [
        "the recipe reads environment variables that are not set:",
        *lines,
        f"set them with: export {' '.join(f'{name}=...' for name in missing)}",
        *([f"only environment variables that begin with {PREFIX} are seen"] if foreign else []),
    ]


def apply(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The document after each ``path=value`` was set, in this order. Entries of a list have numbers (``phases.0.steps=3``).

    Only the schema checks whether the recipe has such a key. Raises ValueError for an override without ``=``, for an entry that a
    list does not have, for a key below a plain value, and for an unpaired surrogate, which no file can contain.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides: {overrides!r:.80} is a text; give a list: [{overrides!r:.80}]")
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"--set {override}: write it as --set some.key=value")
        value = value_of(text)
        try:
            json.dumps([keys, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"--set {override!a:.80}: not UTF-8 text") from None
        _set(changed, keys, value, override)
    return changed


def value_at(document: Any, key: str) -> Any:
    """The value of a key such as ``policy.model.path`` in a recipe's document; None if the document has no such key."""
    for part in key.split("."):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document


def value_of(text: str) -> Any:
    """The JSON value of a text, or the text itself if it is not JSON."""
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
        raise ValueError(f"{where} is a list, and {key!r} is not the number of an entry ({legal})")
    return int(key)


def refuse_secrets(document: Any, environment: Mapping[str, str]) -> None:
    """Raise ValueError if a text contains the value of a secret variable (``..._KEY`` and the like). The message has the place and
    the name of the variable, not its value."""
    known = secrets(environment)
    lines = [
        f"{path}: contains the value of {name}, but recipes are stored and displayed; keep it in the environment only"
        for path, text in _texts(document, "")
        for name, value in known.items()
        if value in text
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in the document, keys included, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}.{index}" if path else str(index))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield path or "the top", str(key)
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
