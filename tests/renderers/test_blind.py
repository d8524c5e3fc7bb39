"""A control whose reward must not improve: the completions do not reach the renderer."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from retouch.renderers.base import IgnoreCompletionsRenderer
from retouch.types import Completion, Task


class Seen:
    """Stores the completions that it receives, and renders one grey image per row."""

    def __init__(self) -> None:
        self.outputs: list[Completion] = []

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image.Image | None]:
        self.outputs = list(trajectory.outputs)
        return [Image.new("RGB", (8, 8), (127, 127, 127)) for _ in tasks]


class Answers:
    outputs = (
        Completion(ids=(4, 5), text="make it red", truncated=False, key=(0, 1, 2, 3)),
        Completion(ids=(4, 5, 6), text="make it red and", truncated=True, key=(0, 1, 2, 4)),
    )


def test_ignore_completions_passes_only_noise_keys_and_instructions_to_the_renderer() -> None:
    seen = Seen()
    tasks = [Task(id=name, instruction=f"paint {name}") for name in ("one", "two")]
    assert len(IgnoreCompletionsRenderer(seen)(tasks, Answers())) == 2
    assert seen.outputs == [
        Completion(ids=(), text=task.instruction, truncated=False, key=written.key)
        for task, written in zip(tasks, Answers.outputs, strict=True)
    ]
