"""Strict JSON: a text means the same value to every reader, and no value is too large or too deep to work with."""

import json
import math
from typing import Any, NoReturn

MOST_DEPTH = 100
MOST_DIGITS = 300


def strict_json(text: str | bytes | bytearray) -> Any:
    """Parse a JSON value.

    Raises ValueError if the text is not UTF-8, for NaN and infinity, a number that is too large for a float, an integer of more
    than ``MOST_DIGITS`` digits, a repeated key, and values that are nested more than ``MOST_DEPTH`` deep.
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = DECODER.decode(decoded)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value] if decoded.count("[") + decoded.count("{") > MOST_DEPTH else []
    for _ in range(MOST_DEPTH):
        items = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in items if isinstance(item, dict | list)]
    if level:
        raise ValueError("nested too deep")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is too large for a JSON number")
    return value


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"{digits:.40} has more than {MOST_DIGITS} digits")
    return int(digits)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return fields


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, parse_int=_integer, object_pairs_hook=_no_repeats)
