"""Scores as the ledger keeps them: a JSON object by column, exact to the bit, null for what could not be judged."""

import json
import math
from collections.abc import Mapping


def written(scores: Mapping[str, float]) -> str:
    """The scores as JSON; NaN becomes null, an infinity a number too large for a float, which is read as one."""
    return "{" + ", ".join(f"{json.dumps(name)}: {_number(value)}" for name, value in scores.items()) + "}"


def read(text: str) -> dict[str, float]:
    """The scores that were written so."""
    return {name: math.nan if value is None else float(value) for name, value in json.loads(text).items()}


def _number(value: float) -> str:
    if math.isnan(value):
        return "null"
    return repr(value) if math.isfinite(value) else "1e999" if value > 0 else "-1e999"
