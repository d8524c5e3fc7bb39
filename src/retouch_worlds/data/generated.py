"""The base classes of the playground's data: a task is generated on access from a seed, a split and the number of the task."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, overload

from retouch.config.section import Count
from retouch.data.base import DataContext, DataSets, DataSource
from retouch.data.guard import refuse_test_sets
from retouch.data.validation import OnBadRow
from retouch.types import SplitName, Task
from retouch_worlds.playground.world.choices import Numbers


class GeneratedData(DataSource):
    """Tasks of the playground, generated from a seed."""

    demonstration_faults: ClassVar[tuple[str, ...]] = ()
    """Keys that add faults to the demonstrations and instructions; they are set to 0 for evaluation."""

    count: Count
    """Number of tasks in the set."""
    seed: int = 0
    """Seed of the tasks."""
    split: SplitName = "train"
    """The split from which scenes, instructions or words are drawn; the three splits are disjoint."""

    @abstractmethod
    def tasks(self, *, in_turn: bool = False) -> Sequence[Task]:
        """The tasks, each generated on access. ``in_turn``: if all numbers of edits or things have equal weights, successive tasks
        go through these numbers in turn instead of drawing them, so that the set has equally many tasks of each number."""

    def build(self, context: DataContext) -> DataSets:
        heldout = context.eval_source
        if not isinstance(heldout, GeneratedData):
            heldout = self.for_evaluation(
                tasks=context.eval_tasks, seed=context.eval_seed, split=context.eval_split, complexity=None
            )
        return DataSets(self.tasks(), heldout.tasks(in_turn=True), self.refuse_test_sets(trains=context.trains))

    def for_evaluation(self, *, tasks: int, seed: int, split: SplitName, complexity: Mapping[int, float] | None) -> Self:
        changes: dict[str, object] = {"count": tasks, "seed": seed, "split": split, **dict.fromkeys(self.demonstration_faults, 0)}
        if complexity is not None and "complexity" in type(self).model_fields:
            changes["complexity"] = complexity
        return self.model_copy(update=changes)

    def refuse_test_sets(self, *, trains: bool = True) -> tuple[str, ...]:
        if not trains or self.split != "test":
            return ()
        found = refuse_test_sets(["playground"], split=self.split, allow_test_sets=self.allow_test_sets)
        return tuple(map(str, found))

    def all_tasks(self, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Sequence[Task]:
        return self.tasks()


class GeneratedTasks(Sequence[Task]):
    """The tasks of a ``GeneratedData`` section, each made by ``_task`` from its number."""

    def __init__(self, data: GeneratedData) -> None:
        self.seed, self.split, self._size = data.seed, data.split, data.count

    @abstractmethod
    def _task(self, index: int) -> Task:
        """The task with the number ``index``, from 0 to ``len(self) - 1``: the same on every call."""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._task(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._task(index % self._size)


def taking_turns(mixture: Mapping[int, float]) -> Numbers:
    """The numbers with a positive weight in ascending order, to be taken in turn, if their weights are equal; else the mixture of
    these numbers."""
    kept = {number: weight for number, weight in mixture.items() if weight > 0}
    return sorted(kept) if len({round(weight / math.fsum(kept.values()), 9) for weight in kept.values()}) == 1 else kept
