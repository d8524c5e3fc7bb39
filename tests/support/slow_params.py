"""Parameters of a test of which `make test` runs only some. `make test-all` runs them all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Mark all values except those in ``fast`` as slow. Raises ValueError if a value in ``fast`` is not among the values."""
    values = list(values)
    if unknown := [value for value in fast if value not in values]:
        raise ValueError(f"not a parameter of this test: {unknown}")
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Mark all values after the first ``count`` as slow."""
    values = list(values)
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.slow) for value in values[count:])]
