"""Renders prompts: an image model makes an image from the prompt in a completion; an editor, from the task's source images too.

The task keeps its own instruction, and a judge sees this instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from retouch.core.answers import answer_in
from retouch.models.base import LanguageModel
from retouch.renderers.base import HasCompletions, ImageModelRenderer, OdeSampler, WeightContext, noise_generators, sort_by_length

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer
    from retouch.types import Completion, Conditioning, Task


class PromptRenderer(ImageModelRenderer):
    """A model that makes an image from the prompt in the completion. An editor, such as FLUX.1 Kontext, edits the task's source
    images as the prompt says."""

    kind: Literal["prompt"] = "prompt"

    can_train: ClassVar[bool] = True

    @property
    def uses_sources(self) -> bool:  # type: ignore[override]
        """Whether the image model takes source images."""
        return self.model.takes is not None and self.model.takes.images[1] > 0

    def written_task(self, model: DenoisingModel, task: Task, completion: Completion) -> Task | None:
        """The task that the image model reads in place of ``task``: the prompt in the completion. None, the policy's own fault, if
        there is no prompt, or one that the model cannot read."""
        if self.ignore_completions:
            prompt: str | None = task.instruction
        elif completion.truncated and self.cut_off == "fault":
            prompt = None
        else:  # the text of a completion without token ids is the instruction, which is not parsed
            prompt = answer_in(completion.text) if completion.ids else completion.text
        images = task.images if self.uses_sources else ()
        return replace(task, instruction=prompt, images=images) if prompt and accepts_prompt(model, prompt) else None

    def problems(self, writer: LanguageModel) -> Iterator[str]:
        yield from writer.prompt_problems()

    def load(
        self, build_writer: Callable[[], AutoregressiveModel], *, device: torch.device, base_frozen: bool
    ) -> tuple[AutoregressiveModel, DenoisingModel | AutoregressiveModel]:
        image_model = self.model.build(device=device)
        return build_writer(), image_model

    def build(
        self,
        image_model: DenoisingModel | AutoregressiveModel,
        writer: AutoregressiveModel,
        *,
        published: WeightContext | None = None,
        sharded: bool = False,
    ) -> Renderer:
        return PromptSampler(cast("DenoisingModel", image_model), self)  # the recipe is checked for it


class PromptSampler:
    """Samples images from the prompts in completions (implements ``retouch.protocols.Renderer``).

    The image of a completion is None, the policy's own fault, if ``PromptRenderer.written_task`` finds no prompt in it. The
    model's negative branch is encoded once for all tasks without source images.
    """

    def __init__(self, model: DenoisingModel, config: PromptRenderer) -> None:
        self.config = config
        self.sampler = OdeSampler(model, num_steps=config.num_steps, guidance_scale=config.guidance_scale)
        self._negative: Conditioning | None = None

    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        config, completions = self.config, trajectory.outputs
        generators = noise_generators(completions, shared=config.shared_noise)
        written = (config.written_task(self.sampler.model, *pair) for pair in zip(tasks, completions, strict=True))
        enhanced = {row: task for row, task in enumerate(written) if task is not None}
        images: list[Image | None] = [None] * len(completions)
        for rows in sort_by_length(list(enhanced), length=lambda row: len(enhanced[row].instruction), batch=config.batch):
            sampled = self.sample([enhanced[row] for row in rows], [generators[row] for row in rows])
            for row, image in zip(rows, sampled, strict=True):
                images[row] = image
        return images

    def sample(self, tasks: Sequence[Task], generators: Sequence[torch.Generator]) -> list[Image | None]:
        """Sample an image for each task's instruction, from the noise of the row's generator; None if it is not finite."""
        import torch

        model = self.sampler.model
        with torch.no_grad():
            conditioning = model.encode(tasks)
            if self.sampler.guided and any(task.images for task in tasks):
                conditioning = replace(conditioning, negative=model.encode_negative(tasks))
            elif self.sampler.guided:
                if self._negative is None:
                    self._negative = model.encode_negative(tasks[:1])
                conditioning = replace(conditioning, negative=self._negative.take(torch.zeros(len(tasks), dtype=torch.long)))
            return self.sampler(conditioning, generators)


def accepts_prompt(model: object, prompt: str) -> bool:
    """Whether the model can read the prompt: it is not too long and contains no special token.

    True for a model without a method ``check_prompt(prompt, task)``.
    """
    check = getattr(model, "check_prompt", None)
    if check is not None:
        try:
            check(prompt, "written")
        except ValueError:
            return False
    return True
