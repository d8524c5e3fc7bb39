"""The playground's tasks with a thought each, for a model that thinks before it draws: the edits in plain words, in their order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from retouch.playground.edits import Edit
from retouch.playground.indirect import completion
from retouch.types import Task


class ThinkingTasks(Sequence[Task]):
    """The given tasks of ``PlaygroundTasks``, with a ``thought`` in their meta."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        found = self._tasks[index]
        return _thinking(found) if isinstance(found, Task) else [_thinking(task) for task in found]


def _thinking(task: Task) -> Task:
    told = task.meta["edits"]
    assert isinstance(told, list)
    return replace(task, meta={**task.meta, "thought": completion([Edit.from_json(edit) for edit in told])})
