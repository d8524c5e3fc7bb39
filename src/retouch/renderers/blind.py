"""A renderer that is not told what was written. As a control: a writer that still gains has not gained by its words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from retouch.protocols import Renderer
from retouch.renderers.sampling import Completed
from retouch.types import Completion, Task


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """A trajectory of which only the noise keys and the number of rows are left."""

    outputs: Sequence[Completion]


class Blind:
    """Draws each row from its task alone: as an empty response, or as the prompt that was asked for (implements
    ``retouch.protocols.Renderer``).
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def __call__(self, tasks: Sequence[Task], trajectory: Completed) -> list[Image | None]:
        outputs = zip(tasks, trajectory.outputs, strict=True)
        unread = [replace(output, ids=(), text=task.instruction, cut_off=False) for task, output in outputs]
        return self.renderer(tasks, Unread(unread))
