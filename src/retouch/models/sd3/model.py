"""Stable Diffusion 3 and 3.5, text to image, as diffusers runs them.

x is (r, 16, height / 8, width / 8) latents in fp32. A conditioning has "embeds" (r, L, 4096) and "pooled" (r, 2048), and in
``shared`` "size", the output's (height, width) in px.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import (
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    T5Tokenizer,
)

from retouch.models.common.folders import LOCAL, diffusers_folder
from retouch.models.common.frozen import evaluating
from retouch.models.common.schedule import pipeline_sigmas
from retouch.models.sd3.text import SD3Text
from retouch.types import Conditioning, Task


class SD3:
    """Stable Diffusion 3 or 3.5. Any of the three text encoders (CLIP, CLIP, T5) may be None, and so its tokenizer.

    ``size``: (height, width) of the output in px, multiples of 16; None is the transformer's own. ValueError for a size beyond its
    table of positions.
    """

    def __init__(
        self,
        *,
        transformer: SD3Transformer2DModel,
        vae: AutoencoderKL,
        text_encoders: tuple[CLIPTextModelWithProjection | None, CLIPTextModelWithProjection | None, T5EncoderModel | None],
        tokenizers: Sequence[PreTrainedTokenizerBase | None],
        scheduler_config: Mapping[str, Any],
        size: tuple[int, int] | None = None,
        max_sequence_length: int = 256,
    ) -> None:
        config = transformer.config
        self.module: nn.Module = transformer
        self.vae = vae
        self.text = SD3Text(
            text_encoders,
            tokenizers,
            joint_dim=config.joint_attention_dim,
            pooled_dim=config.pooled_projection_dim,
            max_sequence_length=max_sequence_length,
        )
        self.scheduler_config = dict(scheduler_config)
        self.channels: int = config.in_channels
        self.latent_pixels: int = 2 ** (len(vae.config.block_out_channels) - 1)
        self.token_pixels: int = self.latent_pixels * config.patch_size
        self.size = (config.sample_size * self.latent_pixels,) * 2 if size is None else size
        most = config.pos_embed_max_size * self.token_pixels
        if any(side % self.token_pixels or not 0 < side <= most for side in self.size):
            raise ValueError(f"size {self.size}: sides must be multiples of {self.token_pixels} px, up to {most}")
        self._images = VaeImageProcessor(vae_scale_factor=self.latent_pixels)

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        size: tuple[int, int] | None = None,
        t5: bool = True,
    ) -> "SD3":
        """The parts of a local diffusers folder (safetensors, no remote code); all but the transformer frozen; T5 if wanted."""
        root = diffusers_folder(path)
        vae = AutoencoderKL.from_pretrained(root / "vae", torch_dtype=dtype, **LOCAL).to(device)
        clips = [
            CLIPTextModelWithProjection.from_pretrained(root / name, dtype=dtype, **LOCAL).to(device)
            for name in ("text_encoder", "text_encoder_2")
        ]
        third = T5EncoderModel.from_pretrained(root / "text_encoder_3", dtype=dtype, **LOCAL).to(device) if t5 else None
        for frozen in (vae, *clips, *([third] if third is not None else [])):
            frozen.requires_grad_(False).eval()
        return cls(
            transformer=SD3Transformer2DModel.from_pretrained(root / "transformer", torch_dtype=dtype, **LOCAL).to(device),
            vae=vae,
            text_encoders=(clips[0], clips[1], third),
            tokenizers=[
                CLIPTokenizer.from_pretrained(root / "tokenizer", local_files_only=True),
                CLIPTokenizer.from_pretrained(root / "tokenizer_2", local_files_only=True),
                T5Tokenizer.from_pretrained(root / "tokenizer_3", local_files_only=True) if t5 else None,
            ],
            scheduler_config=FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True),
            size=size,
        )

    @property
    def parts(self) -> list[nn.Module]:
        """All its modules, the transformer first."""
        return [self.module, self.vae, *self.text.encoders]

    def check_prompt(self, prompt: str, task: str) -> None:
        """Raises ``ValueError`` where the model would refuse the prompt of the task of this name."""
        self.text.check(prompt, task)

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        """The conditioning of these prompts with gradient to the text encoders, in the mode they are in."""
        embeds, pooled = self.text.embed(prompts)
        device = next(self.module.parameters()).device
        return Conditioning({"embeds": embeds.to(device), "pooled": pooled.to(device)}, shared={"size": self.size})

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        for task in tasks:
            self.text.check(task.instruction, task.id)
        with evaluating(*self.text.encoders):
            return self.embed([task.instruction for task in tasks])

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The empty prompt, once a task."""
        with evaluating(*self.text.encoders):
            return self.embed([""] * len(tasks))

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return negative + guidance_scale * (positive - negative)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r c h w"]:
        height, width = (side // self.latent_pixels for side in conditioning.shared["size"])
        shape, device = (1, self.channels, height, width), conditioning.tensors["embeds"].device
        return torch.cat([randn_tensor(shape, generator=generator, device=device, dtype=torch.float32) for generator in generators])

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        height, width = conditioning.shared["size"]
        tokens = (height // self.token_pixels) * (width // self.token_pixels)
        return pipeline_sigmas(self.scheduler_config, num_steps, image_tokens=tokens)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r c h w"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r c h w"]:
        dtype = next(module.parameters()).dtype
        output: Tensor = module(
            hidden_states=x.to(dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=conditioning.tensors["embeds"].to(dtype),
            pooled_projections=conditioning.tensors["pooled"].to(dtype),
            return_dict=False,
        )[0]
        return output.float()

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r c h w"]:
        pixels = torch.cat([self._images.preprocess(image, *self.size) for image in images])
        with evaluating(self.vae):
            latents = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist.mode().float()
        return (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    def decode(self, x: Float[Tensor, "r c h w"], conditioning: Conditioning) -> list[Image]:
        latents = x / self.vae.config.scaling_factor + self.vae.config.shift_factor
        with evaluating(self.vae):
            pixels = self.vae.decode(latents.to(self.vae.device, self.vae.dtype)).sample
        pictures: list[Image] = self._images.postprocess(pixels.float())
        return pictures
