"""Tasks of the playground's painter: what somebody asks for, the exact picture, and what the painter should be told.

Splits differ in their scenes, as those of ``PlaygroundTasks`` do.
"""

import hashlib
from collections.abc import Sequence

import torch

from retouch.core.random import generator
from retouch.playground.world.descriptions import Placed, description, placed
from retouch.playground.world.drawn import DrawnTasks, Mixture, Split, drawn_number, require_mixture
from retouch.playground.world.draws import Draws
from retouch.playground.world.requests import request
from retouch.playground.world.scenes import Scene, random_scene, render
from retouch.playground.world.tasks import canonical, split_of
from retouch.types import Task

MOST_THINGS = 4
# Of lazy completions of three things or more, the share that names one thing alone; the others name two.
_ONE = 0.7


class PaintingTasks(DrawnTasks):
    """``count`` tasks; task i depends on (seed, split, i), ``complexity`` and ``lazy`` alone.

    ``complexity``: the numbers of things in a scene, 1 to 4: a sequence is cycled through, a mapping gives drawing weights.
    ``lazy``: the share of tasks of several things whose completion stops after the first thing or the second: what a writer that
    is to be improved is trained on. A task has no source picture; it has the exact ``target``, the tag ``complexity`` ("2"), and in
    ``meta`` the ``scene`` and the ``completion``: what the painter should be told, things in the order of the instruction.

    Example: ``PaintingTasks(seed=0, count=1000, complexity=[1, 2], split="train")[0].instruction``
    """

    def __init__(self, *, seed: int, count: int, complexity: Mixture, split: Split, lazy: float = 0.0) -> None:
        super().__init__(seed=seed, count=count, split=split)
        if not 0.0 <= lazy <= 1.0:
            raise ValueError(f"lazy lies in 0 to 1, not {lazy}")
        require_mixture(complexity, most=MOST_THINGS, of="things")
        self.lazy, self.complexity = lazy, complexity

    def _scene(self, index: int, random: torch.Generator) -> Scene:
        things = drawn_number(self.complexity, index, Draws(random))
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
