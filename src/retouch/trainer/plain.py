"""Converts values that a script gives to JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retouch.config.section import Section
from retouch.objectives.advantages import Advantage
from retouch.objectives.kinds import ADVANTAGES


def plain(key: str, value: Any) -> Any:
    """Convert the value of a recipe's key to JSON."""
    if isinstance(value, Advantage):
        return ADVANTAGES.document(value)
    if isinstance(value, Section):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return {name: plain(name, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(key, inner) for inner in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of NumPy or of torch
        return value.item()
    return str(value) if isinstance(value, Path) else value
