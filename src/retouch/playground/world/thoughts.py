"""A thought for a playground task, for a model that thinks before it draws: the edits in plain words, in their order."""

from dataclasses import replace

from retouch.playground.world.edits import Edit
from retouch.playground.world.indirect import completion
from retouch.types import Task


def thinking(task: Task) -> Task:
    """The task of ``PlaygroundTasks`` with a ``thought`` in its meta."""
    told = task.meta["edits"]
    assert isinstance(told, list)
    return replace(task, meta={**task.meta, "thought": completion([Edit.from_json(edit) for edit in told])})
