"""Wrappers of renderers, which run them with other weights, with weights copied to a device, or without the completions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image

from retouch.protocols import Renderer
from retouch.renderers.sampling import HasCompletions
from retouch.types import Completion, Task


class RendererInContext:
    """Calls ``renderer`` inside the context that ``context`` opens (implements ``retouch.protocols.Renderer``).

    The context may give the policy's module its averaged weights, or put frozen weights on a device
    (``retouch.models.offloading``).
    """

    def __init__(self, renderer: Renderer, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.renderer = renderer
        self.context = context

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        with self.context():
            return self.renderer(tasks, trajectory)


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """Completions in place of a trajectory (implements ``HasCompletions``)."""

    outputs: Sequence[Completion]

    @classmethod
    def empty(cls, tasks: Sequence[Task], completions: Sequence[Completion]) -> "Completions":
        """Replace each completion by an empty response whose text is the task's instruction; the noise stays the same."""
        pairs = zip(tasks, completions, strict=True)
        return cls([replace(each, ids=(), text=task.instruction, truncated=False) for task, each in pairs])


class IgnoreCompletionsRenderer:
    """A control: makes the image of each row without its completion (implements ``retouch.protocols.Renderer``).

    If a policy still gains reward with this renderer, its completions are not the cause.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        return self.renderer(tasks, Completions.empty(tasks, trajectory.outputs))
