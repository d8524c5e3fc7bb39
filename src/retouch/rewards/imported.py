"""The kind ``import`` for classes that do not derive from ``RewardSection``: any class with ``columns`` and ``__call__``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, JsonValue

from retouch.config.imports import argument_problems, build_class, import_class, import_function
from retouch.config.section import ClassPath
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, unchanged
from retouch.rewards.facts import RunFacts
from retouch.types import Column, Task

if TYPE_CHECKING:
    import torch

    from retouch.rewards.vlm.base import JudgeClients


class ImportedReward(RewardSection):
    """A reward of your own: any class with ``columns`` and ``__call__`` (``retouch.protocols.Reward``). If the class derives from
    ``RewardSection``, ``args`` are its fields, and are checked when the recipe is read.

    Example::

        >>> own = {"class": "retouch.rewards.scorers.pixels:ShareReward", "args": {"channel": "red"}}
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
            from retouch.rewards.function import columns_of, require_columns

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
            from retouch.rewards.function import FunctionReward

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
