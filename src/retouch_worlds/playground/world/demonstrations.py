"""Changes to the playground's demonstrations: targets that lack an edit, and chains of thought."""

from collections.abc import Sequence
from dataclasses import replace

from retouch.core.random import generator
from retouch.types import Task
from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.edits import Edit, apply
from retouch_worlds.playground.world.instructions import completion
from retouch_worlds.playground.world.scenes import Scene


def edits_of(task: Task) -> Sequence[Edit]:
    """The edits of a task of ``PlaygroundTasks``."""
    edits = task.meta["edits"]
    assert isinstance(edits, list)
    return [Edit.from_json(edit) for edit in edits]


def with_unfinished_target(task: Task, *, share: float) -> Task:
    """The task. If it has several edits, its target lacks one of them with probability ``share``, drawn with a generator keyed by
    the task's id.

    Such faults are typical of images that models edit by complex instructions. The instruction and ``meta`` do not change. The
    target stays complete if the other edits would leave the scene empty.
    """
    from retouch_worlds.playground.world.rendering import render

    edits = edits_of(task)
    choices = RandomChoices(generator(0, "unfinished", task.id))
    if len(edits) < 2 or choices.uniform() >= share:
        return task
    scene, missing = Scene.from_json(task.meta["scene"]), choices.integer(len(edits))
    done = [edit for number, edit in enumerate(edits) if number != missing]
    if all(edit.kind == "remove" for edit in done) and len(done) == len(scene.objects):
        return task
    return replace(task, target=render(apply(scene, done)))


def with_thought(task: Task) -> Task:
    """The task with a ``thought`` in ``meta``: its edits in plain words, for models that generate a chain of thought."""
    return replace(task, meta={**task.meta, "thought": completion(edits_of(task))})
