"""Formulas over columns as trees: their value, their range, and whether they rise or fall with a column.

The range is computed from the ranges of the columns by interval arithmetic: it is never too narrow, and it is exact if no column
occurs twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FUNCTIONS = ("sqrt", "min", "max", "mean", "gmean")
PLAIN = r"[A-Za-z_][\w.]*(?:/[A-Za-z_][\w.]*)*"
"""Pattern of the column names that need no backquotes."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Number:
    """A number."""

    value: float

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a column."""

    name: str

    def __str__(self) -> str:
        return self.name if re.fullmatch(PLAIN, self.name, re.ASCII) else f"`{self.name}`"


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum or a difference."""

    left: Node
    right: Node
    sign: Literal["+", "-"]

    def __str__(self) -> str:
        return f"({self.left} {self.sign} {self.right})"


@dataclass(frozen=True, slots=True)
class Product:
    """A product."""

    left: Node
    right: Node

    def __str__(self) -> str:
        return f"{self.left} * ({self.right})" if isinstance(self.right, Product) else f"{self.left} * {self.right}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of ``FUNCTIONS``."""

    function: str
    arguments: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


Node: TypeAlias = Number | Name | Sum | Product | Call
Range: TypeAlias = tuple[float, float]


def names(node: Node) -> tuple[str, ...]:
    """The columns of a formula, each once, in order of appearance."""
    return tuple(dict.fromkeys(_names(node)))


def _names(node: Node) -> Iterator[str]:
    match node:
        case Name(name):
            yield name
        case Sum() | Product():
            yield from _names(node.left)
            yield from _names(node.right)
        case Call():
            for argument in node.arguments:
                yield from _names(argument)


def value(node: Node, columns: Mapping[str, Float[Tensor, " b"]]) -> Float[Tensor, " b"]:
    """The value of the formula for columns (b,), in float64; NaN if one of its columns is NaN."""
    import torch

    match node:
        case Number():
            return torch.tensor(node.value, dtype=torch.float64)
        case Name():
            return columns[node.name].double()
        case Sum():
            left, right = value(node.left, columns), value(node.right, columns)
            return left + right if node.sign == "+" else left - right
        case Product():
            return value(node.left, columns) * value(node.right, columns)
    parts = torch.stack(torch.broadcast_tensors(*(value(argument, columns) for argument in node.arguments)))
    match node.function:
        case "sqrt":
            return parts[0].clamp(min=0).sqrt()
        case "min":
            return parts.amin(dim=0)
        case "max":
            return parts.amax(dim=0)
        case "mean":
            return parts.mean(dim=0)
    return parts.clamp(min=0).prod(dim=0) ** (1 / len(parts))


def bounds(node: Node, ranges: Mapping[str, Range]) -> Range:
    """The lowest and the highest possible value of the formula. Raises ValueError for a root of a value that may be negative."""
    match node:
        case Number():
            return node.value, node.value
        case Name():
            return ranges[node.name]
        case Sum():
            (low, high), (a, b) = bounds(node.left, ranges), bounds(node.right, ranges)
            return (low + a, high + b) if node.sign == "+" else (low - b, high - a)
        case Product():
            return _times(bounds(node.left, ranges), bounds(node.right, ranges))
    parts = [bounds(argument, ranges) for argument in node.arguments]
    if node.function in ("sqrt", "gmean"):
        for argument, (low, high) in zip(node.arguments, parts, strict=True):
            if low < -_ROUNDING * max(1.0, abs(high)):
                raise ValueError(
                    f"combine: {node.function} of {argument}, which may be as low as {low:g} (it ranges from {low:g} to {high:g}); "
                    f"write max({argument}, 0) instead, or add {-low:g}"
                )
    low, high = (_of([part[end] for part in parts], node.function) for end in (0, 1))
    return low, high


def effect(node: Node, name: str, ranges: Mapping[str, Range]) -> int | None:
    """The sign of the change of the formula when the column rises: 1, -1, 0 (the column does not occur), or None (not constant)."""
    match node:
        case Number():
            return 0
        case Name():
            return int(node.name == name)
        case Sum():
            left, right = effect(node.left, name, ranges), effect(node.right, name, ranges)
            return _together([left, right if node.sign == "+" else _turned(right, -1)])
        case Product():
            left = _turned(effect(node.left, name, ranges), _sign(bounds(node.right, ranges)))
            return _together([left, _turned(effect(node.right, name, ranges), _sign(bounds(node.left, ranges)))])
    return _together([effect(argument, name, ranges) for argument in node.arguments])


def _turned(way: int | None, sign: int | None) -> int | None:
    if way == 0:
        return 0
    return None if way is None or sign is None else way * sign


def _together(ways: Sequence[int | None]) -> int | None:
    found = {way for way in ways if way != 0}
    return 0 if not found else found.pop() if len(found) == 1 else None


def _sign(range_: Range) -> int | None:
    low, high = range_
    return 1 if low >= 0 else -1 if high <= 0 else None


def _times(one: Range, other: Range) -> Range:
    # An unbounded column times 0 is 0, because each value of the column is finite.
    products = [0.0 if 0 in (a, b) else a * b for a in one for b in other]
    return min(products), max(products)


def _of(values: Sequence[float], function: str) -> float:
    """The value of a function for single numbers. Each function rises with each of its arguments."""
    match function:
        case "sqrt":
            return math.sqrt(max(values[0], 0.0))
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "mean":
            return sum(values) / len(values)
    return 0.0 if min(values) <= 0 else math.prod(values) ** (1 / len(values))
