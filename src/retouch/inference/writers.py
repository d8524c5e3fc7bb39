"""A writer to use from Python: what it writes for an instruction, without the image model behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image

from retouch.core.answers import answer_in
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.types import Batch, Task


@dataclass(frozen=True, slots=True)
class Reply:
    """``text``: what was written. ``prompt``: the prompt in it, None where there is none. ``cut_off``: it had not ended."""

    text: str
    prompt: str | None
    cut_off: bool


class OpenWriter:
    """Writes the likeliest words, by the averaged weights where the run keeps such. Many at once say what each alone would."""

    def __init__(self, policy: AutoregressivePolicy, *, rows: int) -> None:
        self.policy = policy
        self.rows = rows

    def __call__(self, instruction: str, images: Sequence[Image] = ()) -> Reply:
        """The reply to one instruction, with the pictures that it is about."""
        (reply,) = self.many([instruction], [images])
        return reply

    def many(self, instructions: Sequence[str], images: Sequence[Sequence[Image]] | None = None) -> list[Reply]:
        """The replies to several, each with its pictures. ValueError where there are not as many lists of pictures."""
        pictures = [()] * len(instructions) if images is None else images
        if len(pictures) != len(instructions):
            raise ValueError(f"{len(instructions)} instructions, and pictures for {len(pictures)}: give [] where there are none")
        tasks = [
            Task(id=str(row), instruction=text, images=tuple(seen))
            for row, (text, seen) in enumerate(zip(instructions, pictures, strict=True))
        ]
        return [reply for first in range(0, len(tasks), self.rows) for reply in self._write(tasks[first : first + self.rows])]

    def _write(self, tasks: Sequence[Task]) -> list[Reply]:
        rows = tuple(range(len(tasks)))
        batch = Batch(seed=0, step=0, tasks=tuple(tasks), group_ids=rows, group=rows, slot=(0,) * len(rows))
        written = self.policy.sample(batch).outputs
        return [Reply(each.text, answer_in(each.text), each.cut_off) for each in written]
