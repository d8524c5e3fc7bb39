"""Qwen-Image, text to image, as diffusers runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from retouch.models import qwen_flow, qwen_load
from retouch.models.frozen import evaluating
from retouch.models.qwen_flow import Prepared
from retouch.models.qwen_layout import QwenLatents, Size
from retouch.models.qwen_text import TEXT_TO_IMAGE, QwenText
from retouch.types import Conditioning, Task


class QwenImage:
    """Qwen-Image: a picture from words alone; a task's own pictures are not looked at.

    ``size``: (height, width) of the output in px; None is the pipeline's 1024 x 1024 (128 latents a side). ``template``: None is
    the official one. ``max_tokens``: the longest text in tokens, the template's end included; a longer one is a ValueError.
    """

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
        qwen_flow.check_transformer(transformer)
        self.module: nn.Module = transformer
        self.latents = QwenLatents(vae)
        self.text = QwenText(text_encoder, tokenizer, template=TEXT_TO_IMAGE if template is None else template)
        self.scheduler_config = dict(scheduler_config)
        self.size: Size = (64 * self.latents.token_pixels,) * 2 if size is None else size
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
        """The parts of a local diffusers folder (safetensors, no remote code); all but the transformer frozen."""
        parts = qwen_load.load(path, dtype=dtype, device=device)
        return cls(
            transformer=parts.transformer,
            vae=parts.vae,
            text_encoder=parts.text_encoder,
            tokenizer=parts.tokenizer,
            scheduler_config=parts.scheduler_config,
            size=size,
            template=template,
        )

    def prepare(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Prepared:
        """Everything that needs no gradient: the tokens; ``instructions`` replace the tasks' own."""
        texts = [task.instruction for task in tasks] if instructions is None else list(instructions)
        for task, text in zip(tasks, texts, strict=True):
            self.text.check(text, task.id)
        tokens = self.text.tokenise(texts, [()] * len(texts))
        lengths = tokens["attention_mask"].sum(1) - self.text.prefix
        if lengths.max() > self.max_tokens:
            worst = int(lengths.argmax())
            raise ValueError(f"the text of task {tasks[worst].id!r} has {lengths[worst]} tokens; at most {self.max_tokens}")
        return Prepared(tokens, None, {"grids": (self.latents.grid(self.size),), "size": self.size})

    def embed(self, prepared: Prepared) -> Conditioning:
        """The conditioning with gradient to the text encoder, in the mode the encoder is in: for training it as well."""
        return qwen_flow.conditioning(self.module, self.text, prepared)

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        with evaluating(self.text.encoder):
            return self.embed(self.prepare(tasks))

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The instruction " ", once a task."""
        with evaluating(self.text.encoder):
            return self.embed(self.prepare(tasks, instructions=[" "] * len(tasks)))

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return qwen_flow.combine(positive, negative, guidance_scale)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r s d"]:
        return qwen_flow.initial_noise(conditioning, generators, channels=self.latents.channels)

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        return qwen_flow.sigmas(self.scheduler_config, num_steps, conditioning)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        return qwen_flow.velocity(module, x, sigma, conditioning)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r s d"]:
        return self.latents.encode(images, self.size)

    def decode(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> list[Image]:
        return self.latents.decode(x, conditioning.shared["size"])
