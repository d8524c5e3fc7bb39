"""What the playground's tasks have in common: they are drawn when they are asked for, from a seed, a split and their number."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args, overload

from retouch.playground.world.draws import Draws
from retouch.types import Task

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Mixture: TypeAlias = Sequence[int] | Mapping[int, float]
"""Numbers of edits or things: a sequence is cycled through, a mapping gives drawing weights."""


class DrawnTasks(Sequence[Task]):
    """``count`` tasks of a split, each made by ``_task`` from its number. ValueError: no such split, or a negative count."""

    def __init__(self, *, seed: int, count: int, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
        if count < 0:
            raise ValueError(f"count must not be negative, not {count}")
        self.seed, self.split = seed, split
        self._length = count

    @abstractmethod
    def _task(self, index: int) -> Task:
        """The task of that number, 0 to ``count`` - 1: the same each time."""

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._task(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"task {index} of {self._length}")
        return self._task(index % self._length)


def require_mixture(mixture: Mixture, *, most: int, of: str) -> None:
    """ValueError: a mixture of no numbers, of others than 1 to ``most``, or with weights that cannot be drawn by."""
    if not mixture or any(number not in range(1, most + 1) for number in mixture):
        raise ValueError(f"complexity needs numbers of {of} from 1 to {most}, not {mixture}")
    if isinstance(mixture, Mapping) and not (min(mixture.values()) >= 0 and sum(mixture.values()) > 0):
        raise ValueError(f"weights of complexities must not be negative, and one must be positive: {mixture}")


def drawn_number(mixture: Mixture, index: int, draws: Draws) -> int:
    """The number of edits or things that task ``index`` has; a sequence takes no draw."""
    if not isinstance(mixture, Mapping):
        return mixture[index % len(mixture)]
    point = draws.uniform() * sum(mixture.values())
    for number, weight in mixture.items():
        point -= weight
        if point < 0:
            return number
    return max(number for number, weight in mixture.items() if weight > 0)
