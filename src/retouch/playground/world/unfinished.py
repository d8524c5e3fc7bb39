"""Demonstrations that stop short, as those that models make of complex edits do: one of several edits is left out of the target."""

from dataclasses import replace

from retouch.core.random import generator
from retouch.playground.world.draws import Draws
from retouch.playground.world.edits import Edit, apply
from retouch.playground.world.scenes import Scene, render
from retouch.types import Task


def unfinished(task: Task, *, share: float) -> Task:
    """The task of ``PlaygroundTasks`` whose target, at the probability ``share`` and drawn by its id, lacks one of several edits.

    Instruction, edits and what is judged stay as they are. A target is whole where what is left of the edits would empty the scene.
    """
    told = task.meta["edits"]
    assert isinstance(told, list)
    draws = Draws(generator(0, "unfinished", task.id))
    if len(told) < 2 or draws.uniform() >= share:
        return task
    scene, missing = Scene.from_json(task.meta["scene"]), draws.below(len(told))
    done = [Edit.from_json(edit) for edit in told[:missing] + told[missing + 1 :]]
    if all(edit.kind == "remove" for edit in done) and len(done) == len(scene.objects):
        return task
    return replace(task, target=render(apply(scene, done)))
