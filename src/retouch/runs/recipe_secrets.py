"""No secret of the environment may stand in a recipe: the run keeps it, and trackers and reports show it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
_SHORTEST = 12


def refuse_secrets(document: Any, environment: Mapping[str, str]) -> None:
    """ValueError, naming the place and the variable and not the value, where a text holds that of a ..._KEY, ..._TOKEN or the like.

    A value counts as a secret from 12 characters on and with a digit in it, so that a plain word is none.
    """
    secrets = {name: value.strip() for name, value in environment.items() if _SECRET.search(name) and _is_secret(value.strip())}
    lines = [
        f"{path}: holds the value of {name}, and recipes are kept and shown; leave it in the environment"
        for path, text in _texts(document, "")
        for name, value in secrets.items()
        if value in text
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _is_secret(value: str) -> bool:
    return len(value) >= _SHORTEST and any(sign.isdigit() for sign in value)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text, and every key that is a text, with where it stands."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}.{index}" if path else str(index))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield path or "the top", str(key)
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
