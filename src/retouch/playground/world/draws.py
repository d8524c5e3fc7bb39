"""Small random choices from a torch generator, drawn in blocks because a draw at a time is slow."""

from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

_BLOCK = 48


class Draws:
    """Choices from a generator; it advances the generator by whole blocks, so equal generators give equal choices."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._block: list[float] = []

    def uniform(self) -> float:
        """A number in [0, 1)."""
        if not self._block:
            self._block = torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        return self._block.pop()

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return int(self.uniform() * n)

    def choose(self, options: Sequence[T]) -> T:
        """One of the options, each as likely."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], k: int) -> list[T]:
        """k different options in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(k)]
