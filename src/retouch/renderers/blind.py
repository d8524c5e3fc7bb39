"""A control: a renderer that is not told what was written. A writer that still gains has not gained by its words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from retouch.renderers.sampling import Completed
from retouch.types import Renderer, Task, Written


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """A trajectory of which only the noise keys and the number of rows are left."""

    outputs: Sequence[Written]


class Blind:
    """Draws each row as if its completion were empty and whole (implements ``retouch.types.Renderer``)."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def __call__(self, tasks: Sequence[Task], trajectory: Completed) -> list[Image | None]:
        unread = Unread([replace(output, ids=(), text="", cut_off=False) for output in trajectory.outputs])
        return self.renderer(tasks, unread)
