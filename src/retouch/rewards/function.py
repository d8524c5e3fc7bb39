"""Rewards of your own: a Python function, called with keyword arguments as TRL calls its reward functions, and any class with
``columns`` and ``__call__`` (the kind ``import``).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, JsonValue, PrivateAttr

from retouch.config.imports import argument_problems, build_class, did_you_mean, import_class, import_function, source_place
from retouch.config.section import ClassPath, Section, live_object
from retouch.protocols import Reward
from retouch.rewards.base import JudgeClients, RewardSection, RunFacts, unchanged
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch

RewardFunction: TypeAlias = Callable[..., Iterable[float | None]]
F = TypeVar("F", bound=RewardFunction)

UNBOUNDED = 1e9
"""Upper end of the range of a function without a declared range; the lower end is its negative."""
OWN_ARGUMENTS = ("images", "prompts", "sources", "completions", "targets", "masks", "texts", "tasks")
"""The arguments that each function may have; an argument with another name is a column of the data set."""
_DECLARED = "__retouch_reward__"


def range_text(low: float, high: float) -> str:
    """The range of a column or of a combined reward in words. A function without a declared range makes it unlimited."""
    return "no declared range" if max(-low, high) >= UNBOUNDED else f"{low:g} to {high:g}"


class DeclaredRange(Section):
    """The range of a function's scores."""

    low: float
    """Lowest score."""
    high: float
    """Highest score."""
    higher_is_better: bool = True
    """Whether a higher score is better. A sample without an image gets the worst score."""


def reward(
    *bare: object, low: float | None = None, high: float | None = None, higher_is_better: bool = True, completions: bool = False
) -> Callable[[F], F]:
    """Declare the range of a reward function, so that a score outside of the range raises an error.

    ``completions``: the function receives the text that the policy wrote. Raises ValueError if the range is missing (as in
    ``@retouch.reward`` without parentheses), empty or infinite.

    Example::

        >>> @retouch.reward(low=0, high=1)
        ... def brightness(images, **kwargs):
        ...     return [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in images]
    """
    if bare or low is None or high is None:
        where = f" of {given.__name__}" if bare and inspect.isroutine(given := bare[0]) else ""
        raise ValueError(
            f"retouch.reward: give the range of the scores{where}: @retouch.reward(low=0, high=1); without one, leave it out"
        )
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"a reward with the range {low} to {high}: give finite numbers with low < high")

    def declare(function: F) -> F:
        setattr(function, _DECLARED, (DeclaredRange(low=low, high=high, higher_is_better=higher_is_better), completions))
        return function

    return declare


@dataclass
class LiveFunction:
    """A reward function of this process, with the lowest and the highest score that it has returned (None before the first
    call)."""

    function: RewardFunction
    low: float | None = None
    high: float | None = None

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One score per sample, NaN if the function returned None or NaN. Raises the errors of ``FunctionReward.__call__``."""
        returned: Any = self.function(**arguments(self.function, samples))
        if hasattr(returned, "detach"):  # a tensor, perhaps with a gradient
            returned = returned.detach().cpu()
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        own = reward_name(self.function)
        if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
            raise ValueError(f"reward function {own} returned {type(returned).__name__}; return a list of floats, one per image")
        given = list(returned)
        if len(given) != len(samples):
            raise ValueError(f"reward function {own} returned {len(given)} scores for {len(samples)} images; return one per image")
        scores = [_number(score, self.function) for score in given]
        known = [score for score in scores if not math.isnan(score)]
        self.low = min([*known, *([] if self.low is None else [self.low])], default=None)
        self.high = max([*known, *([] if self.high is None else [self.high])], default=None)
        return scores


class FunctionReward(RewardSection):
    """A Python function of this process as a reward. It has one column, which has the name of the function.

    Example::

        >>> retouch.rewards.FunctionReward.of(brightness).name  # a Trainer makes this of a function
        'brightness'
    """

    kind: Literal["function"] = "function"
    name_: str = Field(alias="name", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The name of the function and of its column."""
    source: str
    """16 hexadecimal digits of the SHA-256 of the function's source code, or of its qualified name if the source is not known. For
    a ``functools.partial``, also of the bound arguments; an argument that is not JSON counts by its qualified name or its type."""
    range: DeclaredRange | None = None
    """The declared range of the scores; null if the function declares none."""
    sees_completions: bool = False
    """Whether the function receives the text that the policy wrote."""

    _live: LiveFunction | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, function: RewardFunction) -> FunctionReward:
        """Make the reward of a function. Raises ValueError if the object cannot be called with keyword arguments."""
        name = reward_name(function)
        found: Any = getattr(function, _DECLARED, None) or getattr(_unwrapped(function), _DECLARED, (None, False))
        declared, completions = found
        takes = _parameters(function)
        called = _unwrapped(function)
        target: Any = called if inspect.isroutine(called) else type(called)
        try:
            text = inspect.getsource(target)
        except (OSError, TypeError):
            text = _qualified_name(target)
        if isinstance(function, functools.partial):
            text += json.dumps([function.args, sorted(function.keywords.items())], skipkeys=True, default=_qualified_name)
        section = cls(
            name=name,
            source=hashlib.sha256(text.encode()).hexdigest()[:16],
            range=declared,
            sees_completions=completions or "completions" in takes,
        )
        section._live = LiveFunction(function)
        return section

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.name_

    @property
    def columns(self) -> Mapping[str, Column]:  # type: ignore[override]
        """One column; its range is -1e9 to 1e9 if the function declares none."""
        given = self.range or DeclaredRange(low=-UNBOUNDED, high=UNBOUNDED)
        return {self.name: Column(given.low, given.high, higher_is_better=given.higher_is_better)}

    @property
    def reads_completions(self) -> bool:  # type: ignore[override]
        """Whether the function receives the text that the policy wrote."""
        return self.sees_completions

    @property
    def fingerprint(self) -> str:
        """The name of the function and the hash of its source."""
        return self.live_name

    @property
    def live_name(self) -> str:
        """The name of the function in the table of live objects of a run."""
        return f"{self.name}:{self.source}"

    def require_columns(self, tasks: Sequence[Task]) -> None:
        """Raise ValueError if the function has an argument that is no column of the data set."""
        require_columns(self.model.function, columns_of(tasks))

    def load(self, device: torch.device | str) -> LiveFunction:
        """Return the function. Raises ValueError if it does not exist in this process."""
        found: LiveFunction = self._live or live_object(self.live_name, key="reward")
        return found

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float64; NaN if the function returned None or NaN for a sample. Raises ValueError for a wrong number of
        scores, for a score that is not a finite number, and for an argument that is no column of the data set."""
        import torch

        return {self.name: torch.tensor(self.model.score(samples), dtype=torch.float64, device="cpu")}


def arguments(function: RewardFunction, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The keyword arguments for a call of the function, each a list with one entry per sample; all of them if it takes
    ``**kwargs``. The bound arguments of a partial keep their values.

    Raises ValueError for an argument without a default that is neither in ``OWN_ARGUMENTS`` nor a column of the data set.
    """
    takes, bound = _parameters(function), _bound(function)
    own: dict[str, list[Any]] = {
        "images": [sample.image for sample in samples],
        "prompts": [sample.task.instruction for sample in samples],
        "sources": [sample.task.images[0] if sample.task.images else None for sample in samples],
        "completions": [sample.completion for sample in samples],
        "targets": [sample.task.target for sample in samples],
        "masks": [sample.task.mask for sample in samples],
        "texts": [sample.task.text for sample in samples],
        "tasks": [sample.task for sample in samples],
    }
    own = {key: values for key, values in own.items() if key not in bound}
    columns = [column for column in columns_of([sample.task for sample in samples]) if column not in bound]
    require_columns(function, columns)
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    given = dict(own) if everything else {key: own[key] for key in takes if key in own}
    for column in columns:
        if column not in own and (everything or column in takes):
            given[column] = [sample.task.meta.get(column, sample.task.tags.get(column)) for sample in samples]
    return given


def columns_of(tasks: Sequence[Task]) -> list[str]:
    """The columns of the data set that reward functions receive by their own names, sorted."""
    return sorted({column for task in tasks for column in (*task.meta, *task.tags)})


def require_columns(function: RewardFunction, columns: Sequence[str], *, of: str = "the data set") -> None:
    """Raise ValueError if the function has an argument without a default that is neither in ``OWN_ARGUMENTS`` nor one of the
    ``columns`` of the data set. ``of``: the name of the data set in the message."""
    for key, parameter in _parameters(function).items():
        given = key in OWN_ARGUMENTS or key in columns or parameter.kind is parameter.VAR_KEYWORD
        if not given and parameter.default is parameter.empty:
            raise ValueError(
                f"reward function {reward_name(function)} has the argument {key!r}, but {of} has no such column; its columns are "
                f"{', '.join(columns) or '(none)'}, and each function may also have the arguments {', '.join(OWN_ARGUMENTS)}"
                f"{did_you_mean(key, (*OWN_ARGUMENTS, *columns))}"
            )


def reward_name(function: object) -> str:
    """The name of a function's column: its ``__name__``, or the name of its class; for a partial, that of its function.

    Raises ValueError for an object that cannot be called, and for a lambda, because a lambda has no name.
    """
    if not callable(function):
        raise ValueError(f"reward_funcs: {function!r:.60} cannot be called; give a function, a reward object or a reward's name")
    named = _unwrapped(function)
    name = getattr(named, "__name__", None) or type(named).__name__
    if isinstance(getattr(named, "columns", None), Mapping):
        path, weights = f"{type(named).__module__}:{type(named).__qualname__}", dict.fromkeys(named.columns, 1.0)
        instead = f"write reward_funcs={path!r}, reward_weights={weights}"
        raise ValueError(f"reward_funcs: {name} has `columns` and scores samples, as a reward of a recipe does; {instead}")
    if name == "<lambda>":
        raise ValueError("reward_funcs: a lambda has no name for its column; define the function with `def`")
    return str(name)


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """The parameters of the function, without the bound arguments of a partial."""
    bound = _bound(function)
    parameters = {key: each for key, each in inspect.signature(function).parameters.items() if key not in bound}
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.kind is parameter.VAR_POSITIONAL:
            name = reward_name(function)
            raise ValueError(f"reward function {name}: arguments are given by keyword, so {parameter.name} cannot be positional")
    return parameters


def _number(score: Any, function: RewardFunction) -> float:
    if score is None:
        return math.nan
    try:
        number = None if isinstance(score, str | bytes) else float(score)
    except (TypeError, ValueError):
        number = None
    if number is None:
        text = ", which is text" if isinstance(score, str | bytes) else ""
        called = _unwrapped(function)
        place = source_place(called if inspect.isroutine(called) else type(called))
        raise ValueError(
            f"reward function {reward_name(function)}{place} returned {score!r:.60} as a score{text}; return a number, or None if "
            "an image cannot be judged"
        )
    if math.isinf(number):
        name = reward_name(function)
        raise ValueError(f"reward function {name} returned {number}; return a finite number, or None if an image cannot be judged")
    return number


def _unwrapped(function: Any) -> Any:
    """The function that a ``functools.partial`` calls; another object unchanged. A partial of a partial is flat."""
    return function.func if isinstance(function, functools.partial) else function


def _bound(function: Any) -> frozenset[str]:
    """The names of the keyword arguments that a ``functools.partial`` binds; empty for another object."""
    return frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()


def _qualified_name(given: Any) -> str:
    """The module and the qualified name of a function, of a class, or of the class of another object."""
    named = given if hasattr(given, "__qualname__") else type(given)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


class ImportedReward(RewardSection):
    """A reward of your own: any class with ``columns`` and ``__call__`` (``retouch.protocols.Reward``). If the class derives from
    ``RewardSection``, ``args`` are its fields, and are checked when the recipe is read.

    Example::

        >>> own = {"class": "retouch.rewards.pixels:ShareReward", "args": {"channel": "red"}}
        >>> retouch.rewards.load("import", **own)([image])
        {'share': [1.0]}
    """

    kind: Literal["import"] = "import"
    class_: ClassPath = Field(alias="class")
    """The class, as ``package.module:Class``; or a function, as ``package.module:function``, which is called as a reward
    function."""
    args: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of the constructor."""

    def known_columns(self) -> Mapping[str, Column] | None:
        """Return None, because the class is not imported yet."""
        return None

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Also yield the arguments in ``args`` that the constructor does not take, if the class can be imported."""
        yield from super().problems(path, prefix, run)
        try:
            wrong = list(argument_problems(import_class(self.class_), self.args))
        except ValueError:  # a function, or a class that `build` refuses
            return
        for name, problem in wrong:
            yield f"{path}.args.{name}: {self.class_}: {problem}"

    def require_columns(self, tasks: Sequence[Task]) -> None:
        """Raise ValueError if the function has an argument that is no column of the data set."""
        if (function := import_function(self.class_)) is not None:
            require_columns(function, columns_of(tasks))

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Construct the user's class with ``args``, and with ``device`` if its constructor takes one; or make a reward of the
        function.

        Raises ValueError if the class does not exist, or has no ``columns`` or no ``__call__``; it is not instantiated then.
        """
        import torch

        if (function := import_function(self.class_)) is not None:
            if self.args:
                raise ValueError(f"{self.class_} is a function, so args must be empty; remove args, or write a class")
            return keep(FunctionReward.of(function))
        members = ("columns", "__call__")
        made = build_class(self.class_, self.args, device=torch.device(device), what="reward", members=members)
        if not isinstance(made, Reward):
            raise ValueError(f"{self.class_} is not a reward: it needs `columns` and `__call__(samples)`")
        columns: object = made.columns
        if not (isinstance(columns, Mapping) and all(isinstance(column, Column) for column in columns.values())):
            raise ValueError(
                f"{self.class_}: its columns are {columns!r:.60}; give a dictionary of retouch.types.Column, for example "
                'columns = {"score": Column(0.0, 1.0)}'
            )
        return keep(made)
