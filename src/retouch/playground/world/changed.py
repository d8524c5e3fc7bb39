"""Tasks that are changed one by one, when they are asked for."""

from collections.abc import Callable, Sequence
from typing import overload

from retouch.types import Task


class Changed(Sequence[Task]):
    """The given tasks, each as ``change`` makes it."""

    def __init__(self, tasks: Sequence[Task], change: Callable[[Task], Task]) -> None:
        self._tasks = tasks
        self._change = change

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        found = self._tasks[index]
        return self._change(found) if isinstance(found, Task) else [self._change(task) for task in found]
