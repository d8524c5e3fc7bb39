"""From columns to the one number that trains: a weighted sum (a mapping from column to weight), or a formula.

Both are checked against the columns that there are: their names, whether they may decide anything, what the formula may take on,
and which way each column pulls. Only the columns named here can make a sample missing; a column of weight 0 is only logged.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.rewards.combine.formula_parser import read_formula
from retouch.rewards.combine.formulas import Call, Name, Node, Number, Product, Range, Sum, bounds, effect, names, value
from retouch.types import Column, Scores

Combine: TypeAlias = Mapping[str, float] | str


class Combination(Protocol):
    """``columns``: those that it needs. ``low`` and ``high``: what it can be; ``low`` is the reward of a policy's own fault."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        """The reward (b,), float32; NaN where any of its columns is."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Weights are other than 0."""

    weights: Mapping[str, float]
    low: float
    high: float

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        return torch.stack([weight * scores[name] for name, weight in self.weights.items()]).sum(dim=0)

    def __str__(self) -> str:
        return " + ".join(f"{weight:g} x {name}" for name, weight in self.weights.items())


@dataclass(frozen=True, slots=True)
class Formula:
    """``text``: as it was written."""

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
    """What ``combine`` says, over these columns.

    A column may be called by its own name where only one reward has it (``alignment`` for ``judge/alignment``), with ``_`` for
    ``/``, and by its reward's name where that has one column alone. ValueError: no formula, a column that there is not (and the
    nearest), a diagnostic, a root of what may be negative, a range of one point, or a rise of a column of which less is better.
    """
    if isinstance(combine, str):
        node = _resolved(read_formula(combine), columns)
    else:
        weights = _weights(combine, columns)
        node = Number(0.0)
        for name, weight in weights.items():
            node = Sum(node, Product(Number(weight), Name(name)), "+")
    _check_columns(names(node), columns)
    ranges: dict[str, Range] = {name: (column.low, column.high) for name, column in columns.items()}
    low, high = bounds(node, ranges)
    if low == high:
        raise ValueError(f"combine is {low:g} whatever the columns are, so nothing would be learnt")
    _check_directions(node, columns, ranges)
    return Formula(node, combine, low, high) if isinstance(combine, str) else WeightedSum(weights, low, high)


def resolve(name: str, columns: Mapping[str, Column]) -> str:
    """The column that a name in ``combine`` means. ValueError: none, or one of several."""
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


def _check_directions(node: Node, columns: Mapping[str, Column], ranges: Mapping[str, Range]) -> None:
    """More of a column of which less is better must never pay."""
    for name in names(node):
        if not columns[name].higher_is_better and effect(node, name, ranges) != -1:
            raise ValueError(
                f"combine pays for more of {name!r}, of which less is better; give it a negative weight, or write "
                f"({columns[name].high:g} - {Name(name)}) in its place"
            )
