"""Stable Diffusion 3 and 3.5, text to image, as diffusers runs them.

x is (r, 16, height / 8, width / 8) latents in fp32. A conditioning has "embeds" (r, L, 4096) and "pooled" (r, 2048). ``shared`` has
"size", the output's (height, width) in px.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedTokenizerBase, T5EncoderModel, T5Tokenizer

from retouch.models.common.latents import Latents, Size
from retouch.models.common.parts import Scheduler, Source, load_parts
from retouch.models.common.pipeline_model import PipelineModel
from retouch.models.sd3.text import SD3Text
from retouch.types import Conditioning, Task

log = logging.getLogger("retouch")


class SD3(PipelineModel):
    """Stable Diffusion 3 or 3.5. Each of the three text encoders (CLIP, CLIP, T5) may be None together with its tokenizer.

    ``size``: (height, width) of the output in px, multiples of 16; None is the transformer's sample size. Raises ``ValueError`` for
    a size beyond the transformer's table of positions.

    Source: Esser et al. 2024 (arXiv 2403.03206) and diffusers' StableDiffusion3Pipeline.
    """

    size: Size
    text: SD3Text

    def __init__(
        self,
        *,
        transformer: SD3Transformer2DModel,
        vae: AutoencoderKL,
        text_encoders: tuple[CLIPTextModelWithProjection | None, CLIPTextModelWithProjection | None, T5EncoderModel | None],
        tokenizers: Sequence[PreTrainedTokenizerBase | None],
        scheduler_config: Scheduler,
        size: Size | None = None,
        max_sequence_length: int = 256,
    ) -> None:
        config, latents = transformer.config, Latents(vae, token_latents=transformer.config.patch_size)
        size = (config.sample_size * latents.latent_pixels,) * 2 if size is None else size
        most = config.pos_embed_max_size * latents.token_pixels
        if any(side % latents.token_pixels or not 0 < side <= most for side in size):
            raise ValueError(f"size {size}: sides must be multiples of {latents.token_pixels} px, up to {most}")
        text = SD3Text(
            text_encoders,
            tokenizers,
            joint_dim=config.joint_attention_dim,
            pooled_dim=config.pooled_projection_dim,
            max_sequence_length=max_sequence_length,
        )
        super().__init__(transformer=transformer, latents=latents, text=text, scheduler_config=scheduler_config, size=size)

    @classmethod
    def from_pretrained(
        cls, path: Source, *, dtype: torch.dtype, device: torch.device | str, size: Size | None = None, t5: bool | None = None
    ) -> "SD3":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline; everything but the transformer is
        frozen. ``t5``: whether T5 is loaded; None: if the folder or the pipeline has it (``text_encoder_3``)."""
        kinds = {"transformer": SD3Transformer2DModel, "vae": AutoencoderKL}
        kinds |= {"text_encoder": CLIPTextModelWithProjection, "text_encoder_2": CLIPTextModelWithProjection}
        kinds |= {"tokenizer": CLIPTokenizer, "tokenizer_2": CLIPTokenizer}
        if _has_t5(path) if t5 is None else t5:
            kinds |= {"text_encoder_3": T5EncoderModel, "tokenizer_3": T5Tokenizer}
        parts = load_parts(path, dtype=dtype, device=device, **kinds)
        return cls(
            transformer=parts["transformer"],
            vae=parts["vae"],
            text_encoders=(parts["text_encoder"], parts["text_encoder_2"], parts.get("text_encoder_3")),
            tokenizers=(parts["tokenizer"], parts["tokenizer_2"], parts.get("tokenizer_3")),
            scheduler_config=parts["scheduler"],
            size=size,
        )

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        embeds, pooled = self.text.embed(prompts)
        return {"embeds": embeds, "pooled": pooled}

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        return self.conditioning(self.read_prompts(prompts), size=self.size)

    def start(self, num_steps: int) -> None:
        return None

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


def _has_t5(source: Source) -> bool:
    if not isinstance(source, Path | str):
        return source.components.get("text_encoder_3") is not None
    found = (Path(source) / "text_encoder_3").is_dir()
    if not found:
        log.info("%s has no text_encoder_3: T5 is left out, and only CLIP reads the prompts", source)
    return found
