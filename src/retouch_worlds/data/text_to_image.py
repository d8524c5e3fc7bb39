"""The playground's text-to-image tasks: a prompt, the exact image, and the prompt in words that the text-to-image model knows.

The splits have different scenes, as in ``PlaygroundTasks``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from retouch.config.section import NonNegative, Share
from retouch.core.random import generator
from retouch.data.base import Mixture
from retouch.types import Task, TaskContents
from retouch_worlds.data.generated import GeneratedData, GeneratedTasks, taking_turns
from retouch_worlds.data.tasks import canonical, split_of
from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.descriptions import Placed, description, placed
from retouch_worlds.playground.world.requests import request
from retouch_worlds.playground.world.scenes import CELLS, Scene, random_scene

if TYPE_CHECKING:
    import torch

Things: TypeAlias = Annotated[int, Field(strict=False, ge=1, le=CELLS)]
ThingCounts: TypeAlias = Annotated[dict[Things, NonNegative], *get_args(Mixture)[1:]]
# The share of the incomplete completions for three or more things that name only one thing; the others name two.
_ONE = 0.7


class TextToImageData(GeneratedData):
    """Scenes of the playground, requested in words that its text-to-image model does not know: for a writer of prompts. The
    ``completion`` of a task is a prompt in known words. With ``known_words``, this prompt is also the instruction: for the
    text-to-image model itself, which was trained on scenes with 1 to 4 things."""

    demonstration_faults = ("incomplete",)
    renamed_keys: ClassVar[Mapping[str, str]] = {"lazy": "incomplete"}

    kind: Literal["playground-scenes"] = "playground-scenes"
    complexity: ThingCounts
    """Numbers of things in a scene, 1 to 9: a list, or a map from number to weight."""
    known_words: bool = False
    """Write the instructions in words that the text-to-image model was trained on."""
    incomplete: Share = 0.0
    """Share of the tasks with several things whose completion stops after the first or second thing; held-out tasks have none."""

    def contents(self) -> TaskContents:
        return TaskContents(images=False, mask=False, reference=False, target=True, pairs=False)

    def tasks(self, *, in_turn: bool = False) -> TextToImageTasks:
        return TextToImageTasks(self, in_turn=in_turn)


class TextToImageTasks(GeneratedTasks):
    """The tasks of ``TextToImageData``; task i depends only on (seed, split, i), ``complexity`` and ``incomplete``.

    A task has no source image. It has the exact ``target``, the tag ``complexity`` ("2"), and in ``meta`` the ``scene`` and the
    ``completion``: the prompt in known words, with the things in the order of the request. ``in_turn``: see
    ``GeneratedData.tasks``.

    Example: ``TextToImageData(seed=0, count=1000, complexity=[1, 2]).tasks()[0].instruction``
    """

    def __init__(self, data: TextToImageData, *, in_turn: bool = False) -> None:
        super().__init__(data)
        self._incomplete = data.incomplete
        self._known_words = data.known_words
        self._complexity = taking_turns(data.complexity) if in_turn else data.complexity

    def _scene(self, index: int, random: torch.Generator) -> Scene:
        things = RandomChoices(random).number(self._complexity, index)
        while True:
            scene = random_scene(random, least=things, most=things)
            if split_of(canonical(scene)) == self.split:
                return scene

    def _task(self, index: int) -> Task:
        from retouch_worlds.playground.world.rendering import render

        random = generator(self.seed, "painting", self.split, index)
        scene = self._scene(index, random)
        choices = RandomChoices(random)
        things = choices.sample(placed(scene), len(scene.objects))
        named = self._named(things, choices)
        completion = description(scene.background, named)
        text = completion if self._known_words else request(scene.background, things, random)
        digest = hashlib.sha256(f"{canonical(scene)} {text}".encode()).hexdigest()[:8]
        return Task(
            id=f"painting/{self.split}/seed{self.seed}/{index:06d}-{digest}",
            instruction=text,
            target=render(scene),
            tags={"complexity": str(len(things))},
            meta={"scene": scene.to_json(), "completion": completion},
        )

    def _named(self, things: Sequence[Placed], choices: RandomChoices) -> Sequence[Placed]:
        """The things that the completion names."""
        incomplete, one = choices.uniform() < self._incomplete, choices.uniform() < _ONE
        if not incomplete or len(things) == 1:
            return things
        return things[: 1 if one or len(things) == 2 else 2]
