"""The playground's editing tasks: a source image, an instruction and the exact target image, generated on access.

The splits have different scenes, and instructions with different contents (whatever their words). A scene and the content of an
instruction are each hashed to one of ten buckets: the first bucket is the split test, the second validation, and the others train.
A scene or an instruction that belongs to another split is drawn again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from retouch.config.section import Pixels, Share
from retouch.core.random import generator
from retouch.data.base import Mixture
from retouch.data.tasks import MappedTasks
from retouch.types import SplitName, Task, TaskContents
from retouch_worlds.data.generated import GeneratedData, GeneratedTasks, taking_turns
from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.demonstrations import with_thought, with_unfinished_target
from retouch_worlds.playground.world.edits import (
    MOST_EDITS,
    Edit,
    apply,
    edits_of_kinds,
    impossible_edit,
    random_kinds,
    things_needed,
)
from retouch_worlds.playground.world.instructions import content, instruction, untouched
from retouch_worlds.playground.world.scenes import SIZE, Scene, random_scene

if TYPE_CHECKING:
    import torch

# Chosen so that every split has several contents of every kind of single edit, also of removals, which have only 18 contents.
_SALT = "retouch playground 818"


def split_of(text: str) -> SplitName:
    """The split of a scene (its canonical JSON) or of an instruction (its content). Test and validation have a tenth each."""
    bucket = int.from_bytes(hashlib.sha256(f"{_SALT} {text}".encode()).digest()[:8], "big") % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def canonical(scene: Scene) -> str:
    """The JSON of the scene with sorted keys and no spaces: the text that decides its split."""
    return json.dumps(scene.to_json(), sort_keys=True, separators=(",", ":"))


class PlaygroundData(GeneratedData):
    """Scenes and edits drawn from a seed."""

    demonstration_faults: ClassVar[tuple[str, ...]] = ("impossible", "unfinished")
    renamed_keys: ClassVar[Mapping[str, str]] = {"vain": "impossible"}

    kind: Literal["playground"] = "playground"
    complexity: Mixture
    """Numbers of edits in one instruction, 1 to 4: a list, or a map from number to weight."""
    filler: Share = 0.0
    """Share of the instructions with filler: words that request no edit."""
    impossible: Share = 0.0
    """Share of the instructions that also request impossible edits, of things that are not in the image. Always 0 for held-out
    tasks."""
    unfinished: Share = Field(default=0.0, exclude_if=lambda share: share == 0)
    """Share of the tasks with several edits whose target lacks one of the edits, which is typical of demonstrations that were made
    by models. Always 0 for held-out tasks."""
    thought: bool = Field(default=False, exclude_if=lambda thought: not thought)
    """Describe the edits of each task in plain words as a chain of thought, for models that generate one."""

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=False, reference=False, target=True, pairs=False)

    @property
    def generated_size(self) -> Pixels | None:
        return SIZE, SIZE

    def tasks(self, *, in_turn: bool = False) -> Sequence[Task]:
        tasks: Sequence[Task] = PlaygroundTasks(self, in_turn=in_turn)
        if self.unfinished:
            tasks = MappedTasks(tasks, partial(with_unfinished_target, share=self.unfinished))
        return MappedTasks(tasks, with_thought) if self.thought else tasks


class PlaygroundTasks(GeneratedTasks):
    """The tasks of ``PlaygroundData``; task i depends only on (seed, split, i), ``complexity``, ``filler`` and ``impossible``.

    A task has the source image in ``images``, the exact ``target``, the tags ``complexity`` ("2") and ``kinds`` ("add+move"), and
    in ``meta`` the ``scene`` and the ``edits`` as JSON. ``in_turn``: see ``GeneratedData.tasks``.

    Example: ``PlaygroundData(seed=0, count=1000, complexity=[1], filler=0.25).tasks()[0].instruction``
    """

    def __init__(self, data: PlaygroundData, *, in_turn: bool = False) -> None:
        super().__init__(data)
        self._filler, self._impossible_share = data.filler, data.impossible
        self._complexity = taking_turns(data.complexity) if in_turn else data.complexity

    def _draw(self, index: int) -> tuple[Scene, tuple[Edit, ...], str]:
        """Draw a scene, edits and an instruction of this split."""
        random = generator(self.seed, "playground", self.split, index)
        choices = RandomChoices(random)
        filler = choices.uniform() < self._filler
        kinds = random_kinds(choices.number(self._complexity, index), random)
        while True:
            scene = random_scene(random, least=things_needed(kinds))
            if split_of(canonical(scene)) != self.split:
                continue
            for _ in range(8):
                edits = edits_of_kinds(scene, kinds, random)
                if edits is not None and split_of(content(edits)) == self.split:
                    impossible = self._impossible(scene, edits, random)
                    text = instruction(edits, untouched(scene, edits), random, filler=filler, impossible=impossible)
                    return scene, edits, text

    def _impossible(self, scene: Scene, edits: Sequence[Edit], random: torch.Generator) -> list[Edit]:
        """Draw the impossible edits of an instruction: for a share of the instructions one or two, but with at most ``MOST_EDITS``
        edits in the instruction."""
        if self._impossible_share == 0.0:
            return []
        choices = RandomChoices(random)
        if choices.uniform() >= self._impossible_share:
            return []
        made: list[Edit] = []
        wanted = min(1 + choices.integer(2), MOST_EDITS - len(edits))
        while len(made) < wanted:
            edit = impossible_edit(scene, edits, random)
            if split_of(content([edit])) == self.split and edit.thing not in [other.thing for other in made]:
                made.append(edit)
        return made

    def _task(self, index: int) -> Task:
        from retouch_worlds.playground.world.rendering import render

        scene, edits, text = self._draw(index)
        digest = hashlib.sha256(f"{canonical(scene)} {text}".encode()).hexdigest()[:8]
        return Task(
            id=f"playground/{self.split}/seed{self.seed}/{index:06d}-{digest}",
            instruction=text,
            images=(render(scene),),
            target=render(apply(scene, edits)),
            tags={"complexity": str(len(edits)), "kinds": "+".join(sorted(edit.kind for edit in edits))},
            meta={"scene": scene.to_json(), "edits": [edit.to_json() for edit in edits]},
        )
