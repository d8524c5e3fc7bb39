"""Combine columns into the number that the policy is trained on: a weighted sum (a mapping from column to weight), or a formula.

A formula has numbers, columns, ``+ - *``, division by a number, parentheses, and ``sqrt``, ``min``, ``max``, ``mean`` and ``gmean``
(the geometric mean): ``0.6*alignment + 0.4*quality``, ``sqrt(semantic * perceptual)``. A column is written as its name,
``judge/alignment``; a name with characters other than letters, digits, ``_``, ``.`` and ``/`` is put in backquotes. Nothing is
evaluated as Python. The range of a formula is computed from the ranges of the columns by interval arithmetic: it is never too
narrow, and it is exact if no column occurs twice.

Both are checked against the columns of the reward: the names exist and are no diagnostics, the result is not constant, and it does
not rise with a column of which a lower score is better. Only a missing score of a combined column makes the reward of a sample
missing; a column with weight 0 is only logged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from retouch.config.imports import did_you_mean, is_foreign
from retouch.types import Column, Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from retouch.types import Task

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
    match node:
        case Name(name):
            return (name,)
        case Sum() | Product():
            return tuple(dict.fromkeys((*names(node.left), *names(node.right))))
        case Call():
            return tuple(dict.fromkeys(name for argument in node.arguments for name in names(argument)))
    return ()


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
            left, right = bounds(node.left, ranges), bounds(node.right, ranges)
            # An unbounded column times 0 is 0, because each value of the column is finite.
            products = [0.0 if 0 in (a, b) else a * b for a in left for b in right]
            return min(products), max(products)
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


# The name that EARL uses for the square root of the product of two columns.
_ALIASES = {"sqrt(viescore_pqxground_score)": "sqrt(viescore_pq * ground_score)"}
_LONGEST = 1000
_DEEPEST = 50
_TOKEN = re.compile(
    rf"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>{PLAIN})|`(?P<quoted>[^`]+)`|(?P<sign>[-+*/(),])", re.ASCII
)


def read_formula(text: str) -> Node:
    """Parse a formula into a tree. Raises ValueError with the position if the text is not a formula."""
    parser = _Parser(_ALIASES.get("".join(text.split()), text))
    found = parser._sum()
    if parser._peek() is not None:
        parser._fail("an operator (+, -, *) or the end")
    return found


class _Parser:
    """A recursive descent parser, from left to right. ``deep``: the current depth of nested parentheses and signs."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise ValueError(f"combine: the formula has {len(text)} characters; write at most {_LONGEST}")
        self.tokens: list[tuple[str, str, int]] = []
        place = 0
        while place < len(text):
            if text[place].isspace():
                place += 1
                continue
            found = _TOKEN.match(text, place)
            if found is None:
                raise ValueError(f"{text!r}: {text[place]!r} at character {place + 1} is not allowed in a formula")
            kind = str(found.lastgroup)
            self.tokens.append(("name" if kind == "quoted" else kind, found[kind], place))
            place = found.end()
        self.place = 0
        self.deep = 0

    def _sum(self) -> Node:
        left = self._product()
        while (sign := self._take("+", "-")) is not None:
            left = Sum(left, self._product(), "+" if sign == "+" else "-")
        return left

    def _product(self) -> Node:
        left = self._factor()
        while (sign := self._take("*", "/")) is not None:
            right = self._factor()
            if sign == "/":
                if not isinstance(right, Number) or right.value == 0:
                    raise ValueError(f"{self.text!r}: divide only by a number other than 0, not by {right}")
                right = Number(1 / right.value)
            left = Product(left, right)
        return left

    def _factor(self) -> Node:
        self.deep += 1
        if self.deep > _DEEPEST:
            raise ValueError(f"combine: the formula has more than {_DEEPEST} nested parentheses; write a simpler formula")
        found = self._signed()
        self.deep -= 1
        return found

    def _signed(self) -> Node:
        if self._take("-") is not None:
            inner = self._factor()
            return Number(-inner.value) if isinstance(inner, Number) else Product(Number(-1.0), inner)
        if self._take("(") is not None:
            inside = self._sum()
            self._expect(")")
            return inside
        token = self._peek()
        if token is None or token[0] == "sign":
            self._fail("a number, a column or a parenthesis")
        kind, word, _ = token
        self.place += 1
        if kind == "number":
            if math.isinf(float(word)):
                raise ValueError(f"{self.text!r}: {word} is too large a number")
            return Number(float(word))
        return self._call(word) if self._take("(") is not None else Name(word)

    def _call(self, function: str) -> Node:
        if function not in FUNCTIONS:
            raise ValueError(f"{self.text!r}: there is no function {function!r}; there are {', '.join(FUNCTIONS)}")
        arguments = [self._sum()]
        while self._take(",") is not None:
            arguments.append(self._sum())
        self._expect(")")
        if (len(arguments) == 1) != (function == "sqrt"):
            raise ValueError(
                f"{self.text!r}: {function} takes {'one' if function == 'sqrt' else 'two or more'}, not {len(arguments)}"
            )
        return Call(function, tuple(arguments))

    def _peek(self) -> tuple[str, str, int] | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _take(self, *signs: str) -> str | None:
        token = self._peek()
        if token is None or token[0] != "sign" or token[1] not in signs:
            return None
        self.place += 1
        return token[1]

    def _expect(self, sign: str) -> None:
        if self._take(sign) is None:
            self._fail(f"{sign!r}")

    def _fail(self, wanted: str) -> NoReturn:
        token = self._peek()
        found = "the formula ends" if token is None else f"there is {token[1]!r} at character {token[2] + 1}"
        raise ValueError(f"{self.text!r}: {found}, but {wanted} is expected")


Combine: TypeAlias = Mapping[str, float] | str
"""Weights of columns, or a formula."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of weight x column. No weight is 0. ``low`` and ``high``: the range of the result; ``low`` is the reward of a sample
    without an image."""

    weights: Mapping[str, float]
    low: float
    high: float

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return tuple(self.weights)

    def __call__(self, scores: Scores) -> Float[Tensor, " b"]:
        """The reward, (b,), float64; NaN if the score of one of the columns is NaN."""
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


Combination: TypeAlias = WeightedSum | Formula
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
    made: Combination
    if isinstance(combine, str):
        node = _resolved(read_formula(combine), columns)
        _check_columns(names(node), columns)
        ranges: dict[str, Range] = {name: (column.low, column.high) for name, column in columns.items()}
        made = Formula(node, combine, *bounds(node, ranges))
        rising = [name for name in made.columns if effect(node, name, ranges) != -1]
    else:
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


def gradient_weights(rewards: Mapping[str, Any], combine: Combine) -> dict[str, float]:
    """The weight of each reward, by name. A reward without a weight is not scored.

    ``rewards``: differentiable rewards by name (``retouch.protocols.DifferentiableReward``). Raises ValueError for a formula,
    because its roots have no gradient at 0, for an unknown column, and for a reward with several columns and no
    ``gradient_column``.
    """
    if isinstance(combine, str):
        raise ValueError("combine: a formula cannot be used here, because its roots have no gradient at 0; give weights of columns")
    columns: dict[str, Column] = {}
    for name, reward in rewards.items():
        trained = [column for column, each in reward.columns.items() if not each.diagnostic]
        if (own := getattr(reward, "gradient_column", None)) is None and len(trained) != 1:
            raise ValueError(
                f"{type(reward).__name__} has the columns {', '.join(trained)}; name the differentiable one in gradient_column"
            )
        own = trained[0] if own is None else own
        columns[f"{name}/{own}"] = reward.columns[own]
    made = combination(combine, columns)
    assert isinstance(made, WeightedSum), "weights make a sum"
    return {column.partition("/")[0]: weight for column, weight in made.weights.items()}


def weighted_scores(
    rewards: Mapping[str, Any], combine: Combine, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]
) -> Float[Tensor, " r"]:
    """The weighted sum of the rewards' scores of ``images``, values 0 to 1, with gradient in the images."""
    given = {
        name: (images.clone(), [task.copy() for task in tasks]) if is_foreign(reward) else (images, tasks)
        for name, reward in rewards.items()
    }
    scores = [weight * rewards[name].score_tensors(*given[name]) for name, weight in gradient_weights(rewards, combine).items()]
    total: Tensor = sum(scores[1:], scores[0])
    return total
