"""An objective for a writer whose hidden states condition an editor: cross-entropy plus distillation of the hidden states of the
editor's text encoder."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.models.qwen_image.model import QwenImageEdit, QwenText
from retouch.models.qwen_image.responses import CLOSING
from retouch.objectives.imitation import CrossEntropy
from retouch.types import Loss, Minibatch, Task

STRIDE = 2  # distil the states of only every second task, which halves the cost and is sufficient


class HiddenStateDistillation:
    """Cross-entropy plus the distance between the hidden states of the writer and of the editor's text encoder for the same
    dialogues.

    The distance is the squared error divided by the variance, after the editor's text norm and projection. So the writer may use
    the directions that the editor ignores in order to predict its next token.
    """

    def __init__(self, editor: QwenImageEdit, module: Qwen2_5_VLForConditionalGeneration, *, weight: float) -> None:
        words = editor.text
        self.cross_entropy = CrossEntropy()
        self.weight = weight
        self._norm, self._project = (editor.module.get_submodule(name) for name in ("txt_norm", "txt_in"))
        self._turn = words.template.tail + "{}" + CLOSING
        self._editor_text, self._writer_text = (
            QwenText(encoder, words.tokenizer, template=words.template.head + "{}", image_processor=words.image_processor)
            for encoder in (words.encoder, module)
        )

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        yield from self.cross_entropy.losses(policy, minibatch)
        distance = self.distance(minibatch.batch.tasks[::STRIDE])
        yield Loss(self.weight * distance, {"policy/distance": distance.detach()})

    def distance(self, tasks: tuple[Task, ...]) -> Float[Tensor, ""]:
        """The distance for the given tasks and their completions (``completion`` in ``meta``). It is 0 if the writer is the
        editor's own text encoder."""
        bodies = [task.instruction + self._turn.format(task.meta["completion"]) for task in tasks]
        tokens = self._editor_text.tokenise(bodies, [task.images for task in tasks])
        with torch.no_grad():
            states, real = self._editor_text.embed(tokens)
            target = self._projected(states[real])
        projected = self._projected(self._writer_text.embed(tokens)[0][real])
        return (projected - target).square().mean() / (target - target.mean(dim=0)).square().mean()

    def after_step(self, policy: Any, step: int) -> None:
        """Does nothing, because there is no second policy to update."""

    def _projected(self, states: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        projected: Tensor = self._project(self._norm(states))
        return projected
