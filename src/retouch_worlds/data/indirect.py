"""Indirect instructions: a thing has a short name, which is unambiguous only together with the image.

For an image with one circle, "make the circle red" does not say the colour of the circle. The editor needs this colour, because it
was trained on complete names. So a writer that sees the image must add it. The ``completion`` of the task has the complete name of
every thing: "make the green circle red". An incomplete completion of a task with several edits is empty.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from retouch.config.section import Share
from retouch.core.random import generator
from retouch.data.tasks import MappedTasks
from retouch.types import Task
from retouch_worlds.data.tasks import PlaygroundData, PlaygroundTasks
from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.demonstrations import edits_of
from retouch_worlds.playground.world.edits import Edit
from retouch_worlds.playground.world.instructions import JOINS, PHRASES, completion, phrase
from retouch_worlds.playground.world.scenes import Scene, Thing


class IndirectPlaygroundData(PlaygroundData):
    """The playground's scenes and edits with short names of things, which are unambiguous only together with the image: for a
    writer that sees the image and writes the complete names. The ``completion`` of a task has the complete names."""

    demonstration_faults = ("impossible", "unfinished", "incomplete")
    renamed_keys: ClassVar[Mapping[str, str]] = {**PlaygroundData.renamed_keys, "lazy": "incomplete"}

    kind: Literal["playground-indirect"] = "playground-indirect"  # type: ignore[assignment]
    filler: Literal[0] = 0
    """Always 0: these instructions have no filler."""
    impossible: Literal[0] = 0
    """Always 0: these instructions request no impossible edits."""
    unfinished: Literal[0] = Field(default=0, exclude=True)
    """Always 0: a writer learns from completions, not from targets."""
    incomplete: Share = 0.0
    """Share of the tasks with several edits that have an empty completion; held-out tasks have none."""

    def tasks(self, *, in_turn: bool = False) -> MappedTasks:
        return MappedTasks(PlaygroundTasks(self, in_turn=in_turn), partial(indirect, incomplete=self.incomplete))


def names(thing: Thing, scene: Scene) -> tuple[str, ...]:
    """The shortest unambiguous names of a thing in the scene: its colour or its shape if one of them is enough, else both."""
    others = [other for other in scene.objects.values() if other != thing]
    short = []
    if all(other.colour != thing.colour for other in others):
        short.append(f"{thing.colour} one")
    if all(other.shape != thing.shape for other in others):
        short.append(thing.shape)
    return tuple(short) or (" ".join(thing),)


def indirect(task: Task, *, incomplete: float = 0.0) -> Task:
    """The task of ``PlaygroundTasks`` with an indirect instruction and a completion, drawn with a generator keyed by the task's id.

    ``incomplete``: the probability of an empty completion for a task with several edits.
    """
    edits, scene = edits_of(task), Scene.from_json(task.meta["scene"])
    choices = RandomChoices(generator(0, "indirect", task.id))
    completed = [] if choices.uniform() < incomplete and len(edits) > 1 else edits
    clauses = [_clause(edit, scene, choices) for edit in edits]
    return replace(
        task,
        id=f"{task.id}/indirect",
        instruction=choices.choose(JOINS[len(clauses)]).format(*clauses),
        meta={**task.meta, "completion": completion(completed)},
    )


def _clause(edit: Edit, scene: Scene, choices: RandomChoices) -> str:
    """The edit in a random phrasing. A thing to be added is not in the scene, so its complete name is used."""
    pattern = choices.choose(PHRASES[edit.kind])
    name = " ".join(edit.thing) if edit.kind == "add" else choices.choose(names(edit.thing, scene))
    return phrase(edit, pattern.replace("{thing}", name))
