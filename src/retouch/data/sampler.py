"""Selects the tasks of a step and the rows of each rank. The functions depend only on the step, so resuming needs no state.

In the global order of a step's rows, the samples of a task are contiguous: row ``i * group_size + s`` is sample ``s`` of the step's
task ``i``. The rows are split into ``minibatches`` equal contiguous parts, and each part into equal contiguous shares, one for each
rank. So the minibatches do not depend on the number of ranks. A group may be split over several ranks, but not if the number of
tasks of a part is a multiple of the number of ranks.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

from retouch.core.random import generator
from retouch.types import Batch, Task


class LoadedTasks(Sequence[Task]):
    """Tasks that are loaded on access; taking a slice loads nothing. A subclass implements ``__len__`` and ``load``."""

    @abstractmethod
    def load(self, index: int) -> Task:
        """The task with this number, from 0 to ``len(self) - 1``."""

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> "Subset": ...

    def __getitem__(self, index: int | slice) -> "Task | Subset":
        if isinstance(index, slice):
            return Subset(self, range(len(self))[index])
        return self.load(range(len(self))[index])


class Subset(LoadedTasks):
    """Some tasks of a sequence, by index, in the given order; indices may repeat."""

    def __init__(self, tasks: Sequence[Task], indices: Sequence[int]) -> None:
        self._tasks = tasks
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def load(self, index: int) -> Task:
        return self._tasks[self._indices[index]]


@runtime_checkable
class UnindexedTasks(Protocol):
    """Tasks that cannot be indexed, such as the tasks of a stream. ``first``: some of the tasks, as examples."""

    first: Sequence[Task]

    def at_step(self, step: int, *, count: int, places: Sequence[int]) -> Sequence[Task]:
        """The ``count`` tasks of a step; only the tasks at ``places`` need be loaded."""

    def state(self) -> Any:
        """The state that a checkpoint stores, as JSON."""

    def load_state(self, state: Any) -> None:
        """Continue from a stored ``state``."""

    def close(self) -> None:
        """Stop all background processes and threads."""


Drawable: TypeAlias = "Sequence[Task] | UnindexedTasks"


def draw(tasks: Drawable, *, seed: int, step: int, count: int, places: Sequence[int]) -> Sequence[Task]:
    """The ``count`` tasks of a step, counted from the first step of the phase. Only the tasks at ``places`` may be indexed."""
    if isinstance(tasks, UnindexedTasks):
        return tasks.at_step(step, count=count, places=places)
    return Subset(tasks, tasks_for_step(seed=seed, step=step, count=count, size=len(tasks)))


def examples(tasks: Drawable) -> Sequence[Task]:
    """All tasks of a sequence, or the first tasks of a stream."""
    return tasks.first if isinstance(tasks, UnindexedTasks) else tasks


def tasks_for_step(*, seed: int, step: int, count: int, size: int) -> list[int]:
    """The row numbers of the ``count`` tasks of a step, each from 0 to ``size - 1``.

    Every pass over the data draws each row once; the order of pass k is keyed by (seed, k). A step at the end of a pass continues
    with the next pass, so it may contain a row twice, as two groups. Raises ValueError if ``count`` or ``size`` is below 1.
    """
    import torch

    if size < 1 or count < 1:
        raise ValueError(f"{count} tasks a step from {size} rows: both must be at least 1")

    first = step * count
    rows: list[int] = []
    for turn in range(first // size, (first + count - 1) // size + 1):
        order = torch.randperm(size, generator=generator(seed, "tasks", turn))
        start = turn * size
        rows += order[max(first - start, 0) : first + count - start].tolist()
    return rows


def further_tasks(*, seed: int, step: int, count: int, size: int, turn: int) -> list[int]:
    """The row numbers of the ``count`` tasks that replace tasks of a step in its refill number ``turn``, from 1.

    They are drawn without replacement over all refills of the step, keyed by (seed, step), from the rows that ``tasks_for_step``
    does not give this step. If these rows are used up, they are drawn again; if there are none, all rows are used.
    """
    import torch

    own = set(tasks_for_step(seed=seed, step=step, count=count, size=size))
    order = torch.randperm(size, generator=generator(seed, "refill", step)).tolist()
    others = [row for row in order if row not in own] or order
    first = (turn - 1) * count
    return [others[(first + place) % len(others)] for place in range(count)]


def steps_for_passes(passes: float, *, size: int, count: int) -> int:
    """The number of steps of ``count`` tasks in ``passes`` passes over ``size`` rows, rounded up. Raises ValueError if
    ``passes`` <= 0."""
    if passes <= 0:
        raise ValueError(f"{passes} passes over the data must be above 0")
    return math.ceil(Fraction(str(passes)) * size / count)  # exact in decimal: 0.07 * 100 is above 7 in binary


def global_rows(*, rows: int, minibatches: int, rank: int, world: int) -> list[int]:
    """The row numbers of this rank in the global order of the step's ``rows`` rows, minibatch after minibatch.

    Each rank has ``rows // (minibatches * world)`` rows of a minibatch.
    """
    assert rows % (minibatches * world) == 0, "check_arithmetic has checked this"
    part = rows // minibatches
    share = part // world
    return [m * part + rank * share + i for m in range(minibatches) for i in range(share)]


def places_in_step(*, count: int, group_size: int, minibatches: int, rank: int, world: int) -> list[int]:
    """The numbers of the step's tasks, each from 0 to ``count - 1``, for which this rank makes samples."""
    mine = global_rows(rows=count * group_size, minibatches=minibatches, rank=rank, world=world)
    return sorted({row // group_size for row in mine})


def assign(*, seed: int, step: int, tasks: Sequence[Task], group_size: int, minibatches: int, rank: int, world: int) -> Batch:
    """The rows of this rank in a step with the given ``tasks``. Loads only the tasks of these rows."""
    mine = global_rows(rows=len(tasks) * group_size, minibatches=minibatches, rank=rank, world=world)
    groups = sorted({row // group_size for row in mine})
    place = {group: k for k, group in enumerate(groups)}
    return Batch(
        seed=seed,
        step=step,
        tasks=tuple(tasks[group] for group in groups),
        group_ids=tuple(groups),
        group=tuple(place[row // group_size] for row in mine),
        slot=tuple(row % group_size for row in mine),
    )


def check_arithmetic(*, tasks_per_step: int, group_size: int, minibatches: int, world: int) -> None:
    """Raise ValueError, with valid values nearby, if the rows of a step cannot be divided evenly over minibatches and ranks."""
    given = {"tasks_per_step": tasks_per_step, "group_size": group_size, "minibatches": minibatches, "world": world}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; use at least 1")
    rows, parts = tasks_per_step * group_size, minibatches * world
    if rows % parts:
        tasks = _multiples(parts // math.gcd(parts, group_size), tasks_per_step)
        groups = _multiples(parts // math.gcd(parts, tasks_per_step), group_size)
        fewer = [str(m) for m in range(1, minibatches + 1) if rows % (m * world) == 0]
        alone = f", or minibatches {' or '.join(fewer)}" if fewer else ""
        raise ValueError(
            f"tasks_per_step * group_size = {rows} rows do not divide over {_count(world, 'rank', 's')} in "
            f"{_count(minibatches, 'minibatch', 'es')}: use tasks_per_step {tasks}, or group_size {groups}{alone}"
        )


def _multiples(unit: int, near: int) -> str:
    """Three successive multiples of ``unit``; the first is the largest one not above ``near``, but at least ``unit``."""
    first = max(near // unit, 1)
    return f"{first * unit}, {(first + 1) * unit} or {(first + 2) * unit}"


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
