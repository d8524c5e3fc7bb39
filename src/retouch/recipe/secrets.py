"""No secret of the environment may stand in a recipe: the run keeps it, and trackers and reports show it."""

from collections.abc import Iterator, Mapping
from typing import Any

from retouch.rewards.vlm import credentials


def refuse_secrets(document: Any, environment: Mapping[str, str]) -> None:
    """ValueError, naming the place and the variable and not the value, where a text holds that of a ..._KEY or the like."""
    secrets = credentials.secrets(environment)
    lines = [
        f"{path}: holds the value of {name}, and recipes are kept and shown; leave it in the environment"
        for path, text in _texts(document, "")
        for name, value in secrets.items()
        if value in text
    ]
    if lines:
        raise ValueError("\n".join(lines))


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
