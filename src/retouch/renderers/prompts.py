"""From a rewritten prompt to a picture: a frozen text-to-image model draws what the completion says (system C).

The task keeps the prompt as it was asked for, and that is what a judge sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from PIL.Image import Image

from retouch.core.answers import answer_in
from retouch.protocols import DenoisingModel
from retouch.renderers.sampling import Completed, CutOff, OdeSampler, by_length, noise
from retouch.types import Conditioning, Task


@runtime_checkable
class Painter(Protocol):
    """A frozen text-to-image model."""

    def reads(self, prompt: str) -> bool:
        """Whether the prompt can be read to its end."""
        ...

    def paint(self, tasks: Sequence[Task], generators: Sequence[torch.Generator]) -> list[Image | None]:
        """A picture for each task's instruction, of noise from the row's generator; None where it is not finite."""
        ...


class FlowPainter:
    """A flow-matching model without source pictures (SD3, Qwen-Image), with its negative branch encoded once.

    ``reads``: whether a prompt is one for this model, ``functools.partial(accepts_prompt, model)`` for example
    (``retouch.models.common.pipeline_model``).
    """

    def __init__(self, model: DenoisingModel, *, num_steps: int, guidance_scale: float = 1.0, reads: Callable[[str], bool]) -> None:
        self.sampler = OdeSampler(model, num_steps=num_steps, guidance_scale=guidance_scale)
        self._reads = reads
        self._negative: Conditioning | None = None

    def reads(self, prompt: str) -> bool:
        return self._reads(prompt)

    def paint(self, tasks: Sequence[Task], generators: Sequence[torch.Generator]) -> list[Image | None]:
        conditioning = self.sampler.model.encode(tasks)
        if self.sampler.guided:
            if self._negative is None:
                self._negative = self.sampler.model.encode_negative(tasks[:1])
            conditioning = replace(conditioning, negative=self._negative.take(torch.zeros(len(tasks), dtype=torch.long)))
        return self.sampler(conditioning, generators)


class PromptRenderer:
    """Draws what each row's completion asks for (implements ``retouch.protocols.Renderer``).

    ``rows``: most rows in one call of the model. ``cut_off``: a completion that reached the longest length is drawn as far as it
    goes, or is the policy's own fault. ``shared_noise``: the samples of a group start alike.

    A completion without a prompt in it, or with one that the model cannot read, is not drawn and gives None.
    """

    def __init__(self, painter: Painter, *, cut_off: CutOff, shared_noise: bool = True, rows: int = 8) -> None:
        if rows < 1:
            raise ValueError(f"rows {rows}: give at least 1")
        self.painter = painter
        self.cut_off = cut_off
        self.shared_noise = shared_noise
        self.rows = rows

    @torch.no_grad()
    def __call__(self, tasks: Sequence[Task], trajectory: Completed) -> list[Image | None]:
        outputs = trajectory.outputs
        generators = noise(outputs, shared=self.shared_noise)
        rewritten: dict[int, Task] = {}
        for row, (task, output) in enumerate(zip(tasks, outputs, strict=True)):
            prompt = None if output.cut_off and self.cut_off == "fault" else answer_in(output.text)
            if prompt is not None and self.painter.reads(prompt):
                rewritten[row] = replace(task, instruction=prompt, images=())
        images: list[Image | None] = [None] * len(outputs)
        for batch in by_length(list(rewritten), length=lambda row: len(rewritten[row].instruction), at_most=self.rows):
            drawn = self.painter.paint([rewritten[row] for row in batch], [generators[row] for row in batch])
            for row, image in zip(batch, drawn, strict=True):
                images[row] = image
        return images
