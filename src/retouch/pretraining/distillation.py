"""An objective for a writer whose hidden states an editor reads: cross-entropy, and distillation of the text encoder's states."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.models.qwen_image.edit import QwenImageEdit
from retouch.models.qwen_image.responses import CLOSING
from retouch.models.qwen_image.text import QwenText
from retouch.objectives.cross_entropy import CrossEntropy
from retouch.types import Loss, Minibatch, Task

READ = 2  # distil the states of every second task, which is enough and halves the cost


class HiddenStateDistillation:
    """Cross-entropy, and the distance of the writer's hidden states from those of the editor's text encoder for the same dialogues.

    The distance is the squared error divided by the variance, after the editor's text norm and projection. So the writer may use
    the directions that the editor ignores to predict its next token.
    """

    def __init__(self, editor: QwenImageEdit, module: Qwen2_5_VLForConditionalGeneration, *, weight: float) -> None:
        words = editor.text
        self.says = CrossEntropy()
        self.weight = weight
        self._norm, self._project = (editor.module.get_submodule(name) for name in ("txt_norm", "txt_in"))
        self._turn = words.template.tail + "{}" + CLOSING
        self._theirs, self._ours = (
            QwenText(encoder, words.tokenizer, template=words.template.head + "{}", image_processor=words.image_processor)
            for encoder in (words.encoder, module)
        )

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        yield from self.says.losses(policy, minibatch)
        distance = self.distance(minibatch.batch.tasks[::READ])
        yield Loss(self.weight * distance, {"policy/distance": distance.detach()})

    def distance(self, tasks: tuple[Task, ...]) -> Float[Tensor, ""]:
        """Of the tasks with their completions (``completion`` in their meta); 0 is the editor's own encoder."""
        bodies = [task.instruction + self._turn.format(task.meta["completion"]) for task in tasks]
        tokens = self._theirs.tokenise(bodies, [task.images for task in tasks])
        with torch.no_grad():
            states, real = self._theirs.embed(tokens)
            wanted = self._taken_in(states[real])
        found = self._taken_in(self._ours.embed(tokens)[0][real])
        return (found - wanted).square().mean() / (wanted - wanted.mean(dim=0)).square().mean()

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: there is no second policy."""

    def _taken_in(self, states: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        taken: Tensor = self._project(self._norm(states))
        return taken
