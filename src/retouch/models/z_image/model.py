"""Z-Image and Z-Image-Turbo, text to image, as diffusers runs them.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, 2560) and "mask" (r, L) for the text, and in ``shared``
"size", the output's (height, width) in px.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Model

from retouch.models.common.folders import LOCAL, diffusers_folder
from retouch.models.common.frozen import evaluating
from retouch.models.common.schedule import pipeline_sigmas
from retouch.models.flux.latents import FluxLatents, Size
from retouch.models.qwen_image.layout import pack, unpack
from retouch.models.z_image.text import ZImageText
from retouch.types import Conditioning, Task

LORA_TARGETS = (
    *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
)
"""Attention and feed-forward layers of every block, those that refine picture and text before they meet among them."""


class ZImage:
    """Z-Image: a picture from words alone.

    ``size``: (height, width) of the output in px; None is the pipeline's 1024 x 1024 (128 latents a side). ValueError for sides
    that do not divide into tokens, or have more of them than the transformer has places for.

    Guidance here is that of the other models, negative + scale * (positive - negative). The pipeline adds its own scale to 1: its
    ``guidance_scale`` 4 is 5 here, and its 0, which Z-Image-Turbo asks for, is 1. Renormalised guidance is not made.
    """

    def __init__(
        self,
        *,
        transformer: ZImageTransformer2DModel,
        vae: AutoencoderKL,
        text: ZImageText,
        scheduler_config: Mapping[str, Any],
        size: Size | None = None,
    ) -> None:
        self.module: nn.Module = transformer
        self.latents = FluxLatents(vae)
        self.text = text
        self.scheduler_config = dict(scheduler_config)
        self.size = (128 * self.latents.latent_pixels,) * 2 if size is None else size
        most = tuple(places * self.latents.token_pixels for places in transformer.config.axes_lens[1:])
        self.latents.grid(self.size)
        if any(side > limit for side, limit in zip(self.size, most, strict=True)):
            raise ValueError(f"size {self.size}: this transformer has places for at most {most[0]} x {most[1]} px (height x width)")

    @classmethod
    def from_pretrained(
        cls, path: Path | str, *, dtype: torch.dtype, device: torch.device | str, size: Size | None = None
    ) -> "ZImage":
        """The parts of a local diffusers folder (safetensors, no remote code); all but the transformer frozen."""
        root = diffusers_folder(path)
        vae = AutoencoderKL.from_pretrained(root / "vae", torch_dtype=dtype, **LOCAL).to(device)
        encoder = Qwen3Model.from_pretrained(root / "text_encoder", dtype=dtype, **LOCAL).to(device)
        for frozen in (vae, encoder):
            frozen.requires_grad_(False).eval()
        return cls(
            transformer=ZImageTransformer2DModel.from_pretrained(root / "transformer", torch_dtype=dtype, **LOCAL).to(device),
            vae=vae,
            text=ZImageText(encoder, Qwen2Tokenizer.from_pretrained(root / "tokenizer", local_files_only=True)),
            scheduler_config=FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True),
            size=size,
        )

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        for task in tasks:
            self.text.check(task.instruction, task.id)
        return self._condition([task.instruction for task in tasks])

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The empty prompt, once a task."""
        return self._condition([""] * len(tasks))

    def _condition(self, prompts: Sequence[str]) -> Conditioning:
        with evaluating(self.text.encoder):
            embeds, mask = self.text.embed(prompts)
        device = next(self.module.parameters()).device
        return Conditioning(
            {"embeds": embeds.to(device), "mask": mask.to(device)}, frozenset({"embeds", "mask"}), {"size": self.size}
        )

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return negative + guidance_scale * (positive - negative)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r s d"]:
        return self.latents.noise(conditioning.shared["size"], generators, conditioning.tensors["embeds"].device)

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        height, width = self.latents.grid(conditioning.shared["size"])
        start = torch.linspace(1.0, 1 / max(num_steps, 1), max(num_steps, 1)).tolist()
        return pipeline_sigmas(self.scheduler_config, num_steps, image_tokens=height * width, start=start)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        dtype, tensors = next(module.parameters()).dtype, conditioning.tensors
        height, width = self.latents.grid(conditioning.shared["size"])
        lengths = tensors["mask"].sum(1).tolist()
        embeds = [row[:length] for row, length in zip(tensors["embeds"].to(dtype), lengths, strict=True)]
        latents = unpack(x, height=height, width=width).to(dtype).unsqueeze(2)
        # Its time runs from noise, 0, to picture, 1, and so does the velocity that it gives.
        output = module(list(latents), (1000 - sigma * 1000) / 1000, embeds, return_dict=False)[0]
        return -pack(torch.stack(output).squeeze(2).float())

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r s d"]:
        return self.latents.encode(self.latents.pixels(images, self.size))

    def decode(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> list[Image]:
        return self.latents.decode(x, conditioning.shared["size"])
