"""Use of a trained language model from Python: its completions for instructions, without the image model."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image

from retouch.core.answers import answer_in
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.types import Batch, Task


@dataclass(frozen=True, slots=True)
class WriterOutput:
    """``text``: the completion. ``prompt``: the prompt in it, None if there is none. ``truncated``: it has no end token."""

    text: str
    prompt: str | None
    truncated: bool


class Writer:
    """Generates completions with greedy decoding, under the averaged weights if the run has them. The completion for an instruction
    does not depend on the other instructions of a call."""

    def __init__(self, policy: AutoregressivePolicy, *, batch: int) -> None:
        self.policy = policy
        self.batch = batch

    def __call__(self, instruction: str, images: Sequence[Image] = ()) -> WriterOutput:
        """The completion for one instruction and its source images."""
        (output,) = self.many([instruction], [images])
        return output

    def many(self, instructions: Sequence[str], images: Sequence[Sequence[Image]] | None = None) -> list[WriterOutput]:
        """The completions for several instructions, each with its images. ValueError if the numbers of both differ."""
        sources = [()] * len(instructions) if images is None else images
        if len(sources) != len(instructions):
            raise ValueError(f"{len(instructions)} instructions, but images for {len(sources)}: use [] for no images")
        tasks = [
            Task(id=str(row), instruction=text, images=tuple(own))
            for row, (text, own) in enumerate(zip(instructions, sources, strict=True))
        ]
        batches = [tasks[first : first + self.batch] for first in range(0, len(tasks), self.batch)]
        return [output for batch in batches for output in self._generate(batch)]

    def _generate(self, tasks: Sequence[Task]) -> list[WriterOutput]:
        rows = tuple(range(len(tasks)))
        batch = Batch(seed=0, step=0, tasks=tuple(tasks), group_ids=rows, group=rows, slot=(0,) * len(rows))
        completions = self.policy.sample(batch).outputs
        return [WriterOutput(each.text, answer_in(each.text), each.truncated) for each in completions]
