"""Random choices from a torch generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Numbers: TypeAlias = Sequence[int] | Mapping[int, float]
"""The numbers of edits or things that a task may have: successive tasks take the numbers of a sequence in turn; a mapping gives the
weights of a random draw."""

_BLOCK = 48


class RandomChoices:
    """Random choices with a generator. It draws blocks of numbers, because single draws are slow. Equal generators give equal
    choices."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._block: list[float] = []

    def uniform(self) -> float:
        """A number in [0, 1)."""
        if not self._block:
            import torch

            self._block = torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        return self._block.pop()

    def integer(self, n: int) -> int:
        """A whole number from 0 to n - 1, uniformly."""
        return int(self.uniform() * n)

    def choose(self, options: Sequence[T]) -> T:
        """One of the options, uniformly."""
        return options[self.integer(len(options))]

    def sample(self, options: Sequence[T], k: int) -> list[T]:
        """k different options in random order."""
        left = list(options)
        return [left.pop(self.integer(len(left))) for _ in range(k)]

    def number(self, numbers: Numbers, index: int) -> int:
        """The number of edits or things of task ``index``. Nothing is drawn if ``numbers`` is a sequence."""
        if not isinstance(numbers, Mapping):
            return numbers[index % len(numbers)]
        point = self.uniform() * sum(numbers.values())
        for number, weight in numbers.items():
            point -= weight
            if point < 0:
                return number
        return max(number for number, weight in numbers.items() if weight > 0)
