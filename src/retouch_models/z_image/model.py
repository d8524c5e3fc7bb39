"""Z-Image and Z-Image-Turbo, text to image, as diffusers runs them.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, 2560) and "mask" (r, L) for the text. ``shared`` has
"size", the output's (height, width) in px.
"""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from jaxtyping import Bool, Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Model

from retouch.models.parts import Scheduler, Source, load_parts
from retouch.models.pipeline import PackedLatents, PipelineModel, Size, pack, unpack
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task
from retouch_models.chat_template import Qwen3Text


class ZImageText(Qwen3Text):
    """Qwen3's next-to-last hidden states (r, L, 2560) for all tokens of the template, with thinking on; padding is zero."""

    FAMILY = "Z-Image"
    LAYERS = (-2,)
    THINKING = True

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Bool[Tensor, "r l"]]:
        states, mask = super().embed(prompts)
        return torch.where(mask[..., None], states, 0), mask


class ZImage(PipelineModel):
    """Z-Image, text to image.

    ``size``: (height, width) of the output in px; None is the pipeline's 1024 x 1024 (128 latents per side). Raises ValueError for
    sides that do not divide into tokens, or that have more tokens than the transformer has positions for.

    Guidance is negative + scale * (positive - negative), as in the other models. The pipeline uses 1 + its ``guidance_scale`` as
    this scale: its 4 is 5 here, and its 0, which Z-Image-Turbo needs, is 1. Renormalised guidance is not supported.

    Source: Z-Image (arXiv 2511.22699) and diffusers' ZImagePipeline.
    """

    latents: PackedLatents
    text: ZImageText

    def __init__(
        self,
        *,
        transformer: ZImageTransformer2DModel,
        vae: AutoencoderKL,
        text: ZImageText,
        scheduler_config: Scheduler,
        size: Size | None = None,
    ) -> None:
        latents = PackedLatents(vae)
        size = (128 * latents.latent_pixels,) * 2 if size is None else size
        super().__init__(transformer=transformer, latents=latents, text=text, scheduler_config=scheduler_config, size=size)
        most = tuple(places * latents.token_pixels for places in transformer.config.axes_lens[1:])
        if any(side > limit for side, limit in zip(size, most, strict=True)):
            raise ValueError(f"size {size}: this transformer has positions for at most {most[0]} x {most[1]} px (height x width)")

    @classmethod
    def from_pretrained(cls, path: Source, *, dtype: torch.dtype, device: torch.device | str, size: Size | None = None) -> "ZImage":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline; everything but the transformer is
        frozen."""
        kinds = {"transformer": ZImageTransformer2DModel, "vae": AutoencoderKL, "text_encoder": Qwen3Model}
        parts = load_parts(path, dtype=dtype, device=device, **kinds, tokenizer=Qwen2Tokenizer)
        return cls(
            transformer=parts["transformer"],
            vae=parts["vae"],
            text=ZImageText(parts["text_encoder"], parts["tokenizer"]),
            scheduler_config=parts["scheduler"],
            size=size,
        )

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        embeds, mask = self.text.embed(prompts)
        return {"embeds": embeds, "mask": mask}

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        assert self.size is not None
        tensors = self.read_prompts(prompts)
        return self.conditioning(tensors, size=self.size, padded=frozenset(tensors))

    def start(self, num_steps: int) -> list[float]:
        return list(torch.linspace(1.0, 1 / num_steps, num_steps).tolist())

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        dtype, tensors = compute_dtype(module), conditioning.tensors
        height, width = self.latents.grid(conditioning.shared["size"])
        lengths = tensors["mask"].sum(1).tolist()
        embeds = [row[:length] for row, length in zip(tensors["embeds"].to(dtype), lengths, strict=True)]
        latents = unpack(x, height=height, width=width).to(dtype).unsqueeze(2)
        # The transformer's time runs from 0 (noise) to 1 (data), so its velocity has the opposite sign.
        output = module(list(latents), (1000 - sigma * 1000) / 1000, embeds, return_dict=False)[0]
        return -pack(torch.stack(output).squeeze(2).float())
