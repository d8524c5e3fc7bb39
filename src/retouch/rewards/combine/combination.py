"""From columns to the one number that trains: a weighted sum (a mapping from column to weight), or a formula.

Both are checked against the columns of the reward: their names, whether they are diagnostics, the range of the result, and that
more of a column of which less is better never raises it. Only the columns named here can make a sample missing; a column of weight
0 is only logged.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from retouch.rewards.combine.formula_parser import read_formula
from retouch.rewards.combine.formulas import Call, Name, Node, Product, Range, Sum, bounds, effect, names, value
from retouch.types import Column, Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Combine: TypeAlias = Mapping[str, float] | str
"""Weights of columns, or a formula."""


class Combination(Protocol):
    """``columns``: those that it reads. ``low`` and ``high``: its range; ``low`` is the reward of a sample without an image."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        """The reward (b,), float32; NaN if any of its columns is."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of weight x column; no weight is 0."""

    weights: Mapping[str, float]
    low: float
    high: float

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        import torch

        return torch.stack([weight * scores[name] for name, weight in self.weights.items()]).sum(dim=0)

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} x {name}" for name, weight in self.weights.items())


NO_COMBINATION = WeightedSum({}, low=0.0, high=1.0)
"""That of a run without a reward."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula over columns; ``text`` as the recipe has it."""

    node: Node
    text: str
    low: float
    high: float

    @property
    def columns(self) -> tuple[str, ...]:
        return names(self.node)

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        return value(self.node, scores).float()

    def __str__(self) -> str:
        return self.text


def combination(combine: Combine, columns: Mapping[str, Column]) -> Combination:
    """The combination that ``combine`` describes, over these columns.

    A short name of a column will do where only one reward has it (``alignment`` for ``judge/alignment``), with ``_`` for ``/``, or
    the reward's name where it has one column. ValueError: not a formula, an unknown column (and the nearest known one), a
    diagnostic, a root of a value that may be negative, a constant, or a result that rises with a column of which less is better.
    """
    made: WeightedSum | Formula
    if isinstance(combine, str):
        node = _resolved(read_formula(combine), columns)
        _check_columns(names(node), columns)
        ranges: dict[str, Range] = {name: (column.low, column.high) for name, column in columns.items()}
        made = Formula(node, combine, *bounds(node, ranges))
        rising = [name for name in made.columns if effect(node, name, ranges) != -1]
    else:
        weights = _weights(combine, columns)
        ends = [sorted((weight * columns[name].low, weight * columns[name].high)) for name, weight in weights.items()]
        made = WeightedSum(weights, sum(low for low, _ in ends), sum(high for _, high in ends))
        rising = [name for name, weight in weights.items() if weight > 0]
    if made.low == made.high:
        raise ValueError(f"combine is {made.low:g} whatever the columns are, so nothing would be learnt")
    for name in rising:
        if not columns[name].higher_is_better:
            raise ValueError(
                f"combine pays for more of {name!r}, of which less is better; give it a negative weight, or write "
                f"({columns[name].high:g} - {Name(name)}) in its place"
            )
    return made


def resolve(name: str, columns: Mapping[str, Column]) -> str:
    """The full name of the column that a name in ``combine`` means. ValueError: none, or more than one."""
    if name in columns:
        return name
    found = [full for full in columns if full.endswith(f"/{name}")]
    found = found or [full for full in columns if full.replace("/", "_") == name]
    if not found:
        own = {name, name.removesuffix("_score")}
        found = [full for full, column in columns.items() if full.partition("/")[0] in own and not column.diagnostic]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"combine names the column {name!r}, which may be {' or '.join(found)}; write which")
    near = difflib.get_close_matches(name, {part for full in columns for part in (full, full.rpartition("/")[2])}, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"combine names the column {name!r}, which the reward does not give; it gives {', '.join(columns)}{meant}")


def _weights(combine: Mapping[str, float], columns: Mapping[str, Column]) -> dict[str, float]:
    """The weights other than 0, by the columns' full names."""
    if not combine:
        raise ValueError(f"combine names no column, so there is no reward; the judge gives {', '.join(columns)}")
    full: dict[str, float] = {}
    for name, weight in combine.items():
        column = resolve(name, columns)
        if column in full:
            raise ValueError(f"combine names the column {column!r} twice; name it once")
        full[column] = weight
    _check_columns(tuple(full), columns)
    weights = {name: weight for name, weight in full.items() if weight != 0}
    if not weights:
        raise ValueError("combine: all weights are 0, so nothing would be learnt; give one column a weight")
    return weights


def _resolved(node: Node, columns: Mapping[str, Column]) -> Node:
    """The formula with the columns' full names."""
    match node:
        case Name(name):
            return Name(resolve(name, columns))
        case Sum():
            return Sum(_resolved(node.left, columns), _resolved(node.right, columns), node.sign)
        case Product():
            return Product(_resolved(node.left, columns), _resolved(node.right, columns))
        case Call():
            return Call(node.function, tuple(_resolved(argument, columns) for argument in node.arguments))
    return node


def _check_columns(named: tuple[str, ...], columns: Mapping[str, Column]) -> None:
    if not named:
        raise ValueError(f"combine names no column, so there is no reward; the judge gives {', '.join(columns)}")
    for name in named:
        if columns[name].diagnostic:
            raise ValueError(f"combine names {name!r}, which is a diagnostic and may be missing by design; combine other columns")
