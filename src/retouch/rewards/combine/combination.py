"""Combine columns into the number that the policy is trained on: a weighted sum (a mapping from column to weight), or a formula.

Both are checked against the columns of the reward: the names exist and are no diagnostics, the result is not constant, and it does
not rise with a column of which a lower score is better. Only a missing score of a combined column makes the reward of a sample
missing; a column with weight 0 is only logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from retouch.config.imports import did_you_mean
from retouch.rewards.combine.formula_parser import read_formula
from retouch.rewards.combine.formulas import Call, Name, Node, Product, Range, Sum, bounds, effect, names, value
from retouch.types import Column, Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Combine: TypeAlias = Mapping[str, float] | str
"""Weights of columns, or a formula."""


class Combination(Protocol):
    """A function of the scores of a batch.

    ``columns``: the columns that it reads. ``low`` and ``high``: the range of the result; ``low`` is the reward of a sample without
    an image.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        """The reward (b,), float64; NaN if the score of one of the columns is NaN."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of weight x column. No weight is 0."""

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
"""The combination of a run without a reward."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula over columns. ``text``: the formula as written in the recipe."""

    node: Node
    text: str
    low: float
    high: float

    @property
    def columns(self) -> tuple[str, ...]:
        return names(self.node)

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        return value(self.node, scores)

    def __str__(self) -> str:
        return self.text


RESERVED = frozenset({"n", "mean", "std", "count", "missing_fraction", "fault_fraction"})
"""Names that a column may not have, because a run's metrics and tables have values with these names."""


def combination(combine: Combine, columns: Mapping[str, Column]) -> Combination:
    """Make the combination of ``columns`` that ``combine`` describes.

    ``combine`` may use short names, as ``resolve`` accepts them. Raises ValueError for an invalid formula, an unknown column (with
    the nearest known one), a column with a name in ``RESERVED``, a diagnostic, a root of a value that may be negative, a constant
    result, or a result that rises with a column of which a lower score is better.
    """
    if taken := sorted(RESERVED & set(columns)):
        raise ValueError(f"the reward has the column {taken[0]!r}, but a run's metrics use this name for something else; rename it")
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
        raise ValueError(f"combine is always {made.low:g}, so nothing would be learnt; combine columns that vary")
    for name in rising:
        if not columns[name].higher_is_better:
            raise ValueError(
                f"combine rises with {name!r}, of which lower is better; give it a negative weight, or in a formula write "
                f"({columns[name].high:g} - {Name(name)}) instead"
            )
    return made


def resolve(name: str, columns: Mapping[str, Column]) -> str:
    """The full name of the column that a name in ``combine`` stands for.

    A name is the full name (``judge/alignment``), the part after the ``/`` (``alignment``), the full name with ``_`` for ``/``
    (``judge_alignment``), or the name of a reward with one column, also with the suffix ``_score``. Raises ValueError if the name
    fits no column or several.
    """
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
        raise ValueError(f"combine names the column {name!r}, which may be {' or '.join(found)}; write the full name")
    meant = did_you_mean(name, {part for full in columns for part in (full, full.rpartition("/")[2])})
    raise ValueError(f"combine names the column {name!r}, but the reward has no such column; it has {', '.join(columns)}{meant}")


def _weights(combine: Mapping[str, float], columns: Mapping[str, Column]) -> dict[str, float]:
    """The weights other than 0, by the full names of the columns."""
    if not combine:
        raise ValueError(f"combine names no column; name at least one of {', '.join(columns)}")
    full: dict[str, float] = {}
    for name, weight in combine.items():
        column = resolve(name, columns)
        if column in full:
            raise ValueError(f"combine names the column {column!r} twice; name it once")
        full[column] = weight
    _check_columns(tuple(full), columns)
    weights = {name: weight for name, weight in full.items() if weight != 0}
    if not weights:
        raise ValueError("combine: all weights are 0, so nothing would be learnt; give at least one column another weight")
    return weights


def _resolved(node: Node, columns: Mapping[str, Column]) -> Node:
    """The formula with the full names of the columns."""
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
        raise ValueError(f"combine names no column; name at least one of {', '.join(columns)}")
    for name in named:
        if columns[name].diagnostic:
            raise ValueError(f"combine names {name!r}, which is a diagnostic and may be missing by design; combine other columns")
