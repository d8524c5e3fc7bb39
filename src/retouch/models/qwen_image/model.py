"""Qwen-Image, text to image, as diffusers runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from retouch.models.common.folders import load_parts
from retouch.models.common.latents import Size
from retouch.models.qwen_image.flow import PARTS, Prepared, QwenFlow
from retouch.models.qwen_image.layout import QwenLatents
from retouch.models.qwen_image.text import TEXT_TO_IMAGE, QwenText
from retouch.types import Task


class QwenImage(QwenFlow):
    """Qwen-Image: an image from a prompt alone; images of a task are ignored.

    ``size``: (height, width) of the output in px; None is the pipeline's 1024 x 1024 (128 latents a side). ``template``: None is
    the official one. ``max_tokens``: the longest prompt in tokens, the template's end included.
    """

    size: Size

    def __init__(
        self,
        *,
        transformer: QwenImageTransformer2DModel,
        vae: AutoencoderKLQwenImage,
        text_encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        scheduler_config: Mapping[str, Any],
        size: Size | None = None,
        template: str | None = None,
        max_tokens: int = 512,
    ) -> None:
        latents = QwenLatents(vae)
        size = (64 * latents.token_pixels,) * 2 if size is None else size
        text = QwenText(text_encoder, tokenizer, template=TEXT_TO_IMAGE if template is None else template)
        super().__init__(transformer=transformer, latents=latents, text=text, scheduler_config=scheduler_config, size=size)
        self.max_tokens = max_tokens

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        size: Size | None = None,
        template: str | None = None,
    ) -> "QwenImage":
        """Load a local diffusers folder (safetensors, no remote code); everything but the transformer is frozen."""
        parts = load_parts(path, dtype=dtype, device=device, **PARTS)
        return cls(**{name: parts[name] for name in PARTS}, scheduler_config=parts["scheduler"], size=size, template=template)

    def prepare(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Prepared:
        """Everything that needs no gradient: the tokens; ``instructions`` replace the tasks' own.

        Raises ``ValueError`` for a prompt of more than ``max_tokens`` tokens.
        """
        texts = [task.instruction for task in tasks] if instructions is None else list(instructions)
        for task, text in zip(tasks, texts, strict=True):
            self.text.check(text, task.id)
        tokens = self.text.tokenise(texts, [()] * len(texts))
        lengths = tokens["attention_mask"].sum(1) - self.text.prefix
        if lengths.max() > self.max_tokens:
            worst = int(lengths.argmax())
            raise ValueError(f"the text of task {tasks[worst].id!r} has {lengths[worst]} tokens; at most {self.max_tokens}")
        return Prepared(tokens, None, {"grids": ((1, *self.latents.grid(self.size)),), "size": self.size})

    def check_prompt(self, prompt: str, task: str) -> None:
        """Raises ``ValueError`` where the model would refuse the prompt of the task of this name."""
        self.prepare([Task(id=task, instruction=prompt)])
