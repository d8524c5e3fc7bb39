"""Tasks of the playground's painter: what somebody asks for, the exact picture, and what the painter should be told.

Splits differ in their scenes, as those of ``PlaygroundTasks`` do.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import overload

import torch

from retouch.core.random import generator
from retouch.playground.descriptions import Placed, description, placed
from retouch.playground.draws import Draws
from retouch.playground.requests import request
from retouch.playground.scenes import Scene, random_scene, render
from retouch.playground.tasks import SPLITS, Split, canonical, split_of
from retouch.types import Task

MOST_THINGS = 4
# Of lazy completions of three things or more, the share that names one thing alone; the others name two.
_ONE = 0.7


class PaintingTasks(Sequence[Task]):
    """``count`` tasks; task i depends on (seed, split, i), ``complexity`` and ``lazy`` alone.

    ``complexity``: the numbers of things in a scene, 1 to 4: a sequence is cycled through, a mapping gives drawing weights.
    ``lazy``: the share of tasks of several things whose completion stops after the first thing or the second: what a writer that
    is to be improved is trained on. A task has no source picture; it has the exact ``target``, the tag ``complexity`` ("2"), and in
    ``meta`` the ``scene`` and the ``completion``: what the painter should be told, things in the order of the instruction.

    Example: ``PaintingTasks(seed=0, count=1000, complexity=[1, 2], split="train")[0].instruction``
    """

    def __init__(
        self, *, seed: int, count: int, complexity: Sequence[int] | Mapping[int, float], split: Split, lazy: float = 0.0
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
        if count < 0 or not 0.0 <= lazy <= 1.0:
            raise ValueError(f"count must not be negative, and lazy lies in 0 to 1, not {count} and {lazy}")
        if not complexity or any(level not in range(1, MOST_THINGS + 1) for level in complexity):
            raise ValueError(f"complexity needs numbers of things from 1 to {MOST_THINGS}, not {complexity}")
        if isinstance(complexity, Mapping) and not (min(complexity.values()) >= 0 and sum(complexity.values()) > 0):
            raise ValueError(f"weights of complexities must not be negative, and one must be positive: {complexity}")
        self.seed, self.split, self.lazy, self.complexity = seed, split, lazy, complexity
        self._length = count

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

    def _number(self, index: int, draws: Draws) -> int:
        if not isinstance(self.complexity, Mapping):
            return self.complexity[index % len(self.complexity)]
        point = draws.uniform() * sum(self.complexity.values())
        for number, weight in self.complexity.items():
            point -= weight
            if point < 0:
                return number
        return max(number for number, weight in self.complexity.items() if weight > 0)

    def _scene(self, index: int, random: torch.Generator) -> Scene:
        things = self._number(index, Draws(random))
        while True:
            scene = random_scene(random, least=things, most=things)
            if split_of(canonical(scene)) == self.split:
                return scene

    def _task(self, index: int) -> Task:
        random = generator(self.seed, "painting", self.split, index)
        scene = self._scene(index, random)
        draws = Draws(random)
        things = draws.sample(placed(scene), len(scene.objects))
        written = self._written(things, draws)
        text = request(scene.background, things, random)
        digest = hashlib.sha256(f"{canonical(scene)} {text}".encode()).hexdigest()[:8]
        return Task(
            id=f"painting/{self.split}/seed{self.seed}/{index:06d}-{digest}",
            instruction=text,
            target=render(scene),
            tags={"complexity": str(len(things))},
            meta={"scene": scene.to_json(), "completion": description(scene.background, written)},
        )

    def _written(self, things: Sequence[Placed], draws: Draws) -> Sequence[Placed]:
        """The things that the completion names."""
        lazy, one = draws.uniform() < self.lazy, draws.uniform() < _ONE
        if not lazy or len(things) == 1:
            return things
        return things[: 1 if one or len(things) == 2 else 2]
