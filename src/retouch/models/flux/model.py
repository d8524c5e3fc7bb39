"""FLUX.1, text to image, as diffusers runs it; its inpainting and editing models derive from it.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, 4096) and "pooled" (r, 768) for the text, and "source" for
models that read a source image. ``shared`` has "size", the output's (height, width) in px, and "sources", the sizes of the source
images.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from retouch.models.common.latents import PackedLatents, Size
from retouch.models.common.parts import Scheduler, Source, load_parts, part_config
from retouch.models.common.pipeline_model import PipelineModel, reference_inputs
from retouch.models.flux.text import FluxText
from retouch.types import Conditioning, Task


class Flux(PipelineModel):
    """FLUX.1-dev or -schnell, text to image.

    ``size``: (height, width) of the output in px; None is the pipeline's 1024 x 1024 (128 latents per side). ``guidance``: the
    input of a guidance-distilled transformer, which needs no second forward pass; None is ``GUIDANCE``, the pipeline's default.

    Source: diffusers' FluxPipeline.
    """

    GUIDANCE: ClassVar[float] = 3.5
    LATENTS: ClassVar[type[PackedLatents]] = PackedLatents
    latents: PackedLatents
    text: FluxText

    def __init__(
        self,
        *,
        transformer: FluxTransformer2DModel,
        vae: AutoencoderKL,
        text: FluxText,
        scheduler_config: Scheduler,
        size: Size | None = None,
        guidance: float | None = None,
    ) -> None:
        self._check(transformer.config, vae.config, guidance)
        super().__init__(
            transformer=transformer, latents=self.LATENTS(vae), text=text, scheduler_config=scheduler_config, size=size
        )
        self._distilled: bool = transformer.config.guidance_embeds
        self.guidance = self.GUIDANCE if guidance is None else guidance

    @classmethod
    def from_pretrained(
        cls,
        path: Source,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        size: Size | None = None,
        guidance: float | None = None,
        max_sequence_length: int = 512,
    ) -> "Flux":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline; everything but the transformer is
        frozen.

        ``max_sequence_length``: as in ``FluxText``.
        """
        configs = part_config(path, "transformer", FluxTransformer2DModel), part_config(path, "vae", AutoencoderKL)
        cls._check(*configs, guidance)  # before gigabytes are read
        kinds = {"transformer": FluxTransformer2DModel, "vae": AutoencoderKL}
        kinds |= {"text_encoder": CLIPTextModel, "tokenizer": CLIPTokenizer}
        kinds |= {"text_encoder_2": T5EncoderModel, "tokenizer_2": T5Tokenizer}
        parts = load_parts(path, dtype=dtype, device=device, **kinds)
        return cls(
            transformer=parts["transformer"],
            vae=parts["vae"],
            text=FluxText(
                parts["text_encoder"],
                parts["text_encoder_2"],
                clip_tokenizer=parts["tokenizer"],
                t5_tokenizer=parts["tokenizer_2"],
                max_sequence_length=max_sequence_length,
            ),
            scheduler_config=parts["scheduler"],
            size=size,
            guidance=guidance,
        )

    @classmethod
    def _check(cls, config: Mapping[str, Any], vae: Mapping[str, Any], guidance: float | None) -> None:
        """Raise ValueError if the transformer belongs to another model, or if it has no guidance input and guidance is given."""
        given, taken = cls._channels(vae), config["in_channels"]
        if given != taken:
            raise ValueError(
                f"{cls.__name__} gives its transformer {given} channels per token, but this transformer takes {taken}; "
                "FLUX.1-Fill has another transformer than FLUX.1 and FLUX.1-Kontext: use the weights of the right model"
            )
        if guidance is not None and not config["guidance_embeds"]:
            raise ValueError(f"guidance {guidance:g}: this transformer takes no guidance (like FLUX.1-schnell's); remove the key")

    @classmethod
    def _channels(cls, vae: Mapping[str, Any]) -> int:
        """Number of the transformer's input channels per token, with an autoencoder of this configuration."""
        return 4 * int(vae["latent_channels"])

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        embeds, pooled = self.text.embed(prompts)
        return {"embeds": embeds, "pooled": pooled}

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        return self.with_images(tasks, self.read_prompts(prompts))

    def with_images(self, tasks: Sequence[Task], tensors: Mapping[str, Tensor]) -> Conditioning:
        """Build the conditioning from the text tensors and from the images of the tasks that the model reads."""
        return self.conditioning(tensors, size=(128 * self.latents.latent_pixels,) * 2 if self.size is None else self.size)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        tokens, where = self._input(x, conditioning)
        dtype, tensors = next(module.parameters()).dtype, conditioning.tensors
        output: Tensor = module(
            hidden_states=tokens.to(dtype),
            # The pipelines also multiply sigma by 1000 and divide again; the rounding changes high frequencies of the embedding.
            timestep=sigma * 1000 / 1000,
            guidance=torch.full((len(x),), self.guidance, device=x.device) if self._distilled else None,
            pooled_projections=tensors["pooled"].to(dtype),
            encoder_hidden_states=tensors["embeds"].to(dtype),
            txt_ids=torch.zeros(tensors["embeds"].shape[1], 3, device=x.device),
            img_ids=where.to(x.device),
            joint_attention_kwargs=reference_inputs(module, conditioning),
            return_dict=False,
        )[0]
        return output[:, : x.shape[1]].float()

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        """The transformer's input tokens, with the tokens of x first, and their positions (image, row, column)."""
        return x, positions(self.latents.grid(conditioning.shared["size"]))


def positions(grid: tuple[int, int], *, image: int = 0) -> Float[Tensor, "t 3"]:
    """(image, row, column) of each token of a grid, row by row."""
    height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).reshape(-1, 3).float()
