"""FLUX.1, text to image, as diffusers runs it; and what its inpainting and editing siblings share with it.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, 4096) and "pooled" (r, 768) for the text, "source" where
there is a picture to work on, and in ``shared`` "size", the output's (height, width) in px.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from jaxtyping import Float
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from retouch.models.common.folders import LOCAL, diffusers_folder
from retouch.models.common.frozen import evaluating
from retouch.models.common.latents import Size
from retouch.models.common.pipeline_model import PipelineModel
from retouch.models.flux.latents import FluxLatents
from retouch.models.flux.text import FluxText
from retouch.models.ip_adapter.adapter import attention_inputs
from retouch.types import Conditioning, Task


class Flux(PipelineModel):
    """FLUX.1-dev or -schnell: a picture from words alone.

    ``size``: (height, width) of the output in px; None is the pipeline's 1024 x 1024 (128 latents a side). ``guidance``: what a
    guidance-distilled transformer is told of it, an input and no second forward; None is ``GUIDANCE``, the pipeline's own.
    """

    GUIDANCE: ClassVar[float] = 3.5
    latents: FluxLatents
    text: FluxText

    def __init__(
        self,
        *,
        transformer: FluxTransformer2DModel,
        vae: AutoencoderKL,
        text: FluxText,
        scheduler_config: Mapping[str, Any],
        size: Size | None = None,
        guidance: float | None = None,
    ) -> None:
        latents = FluxLatents(vae)
        self._check(transformer.config, latents, guidance)
        super().__init__(transformer=transformer, latents=latents, text=text, scheduler_config=scheduler_config, size=size)
        self._distilled: bool = transformer.config.guidance_embeds
        self.guidance = self.GUIDANCE if guidance is None else guidance

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        size: Size | None = None,
        guidance: float | None = None,
        max_sequence_length: int = 512,
    ) -> "Flux":
        """The parts of a local diffusers folder (safetensors, no remote code); all but the transformer frozen.

        ``max_sequence_length``: as in ``FluxText``.
        """
        root = diffusers_folder(path)
        vae = AutoencoderKL.from_pretrained(root / "vae", torch_dtype=dtype, **LOCAL).to(device)
        cls._check(FluxTransformer2DModel.load_config(root / "transformer", local_files_only=True), FluxLatents(vae), guidance)
        clip = CLIPTextModel.from_pretrained(root / "text_encoder", dtype=dtype, **LOCAL).to(device)
        t5 = T5EncoderModel.from_pretrained(root / "text_encoder_2", dtype=dtype, **LOCAL).to(device)
        for frozen in (clip, t5, vae):
            frozen.requires_grad_(False).eval()
        return cls(
            transformer=FluxTransformer2DModel.from_pretrained(root / "transformer", torch_dtype=dtype, **LOCAL).to(device),
            vae=vae,
            text=FluxText(
                clip,
                t5,
                clip_tokenizer=CLIPTokenizer.from_pretrained(root / "tokenizer", local_files_only=True),
                t5_tokenizer=T5Tokenizer.from_pretrained(root / "tokenizer_2", local_files_only=True),
                max_sequence_length=max_sequence_length,
            ),
            scheduler_config=FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True),
            size=size,
            guidance=guidance,
        )

    @classmethod
    def _check(cls, config: Mapping[str, Any], latents: FluxLatents, guidance: float | None) -> None:
        """ValueError where a transformer of this configuration is another family's, or is not told of guidance."""
        given, taken = cls._channels(latents), config["in_channels"]
        if given != taken:
            raise ValueError(
                f"{cls.__name__} gives its transformer {given} channels a token, and this one takes {taken}; "
                "FLUX.1-Fill's transformer is another than that of FLUX.1 and Kontext"
            )
        if guidance is not None and not config["guidance_embeds"]:
            raise ValueError(f"guidance {guidance:g}: this transformer is not told of guidance, as FLUX.1-schnell's; give none")

    @classmethod
    def _channels(cls, latents: FluxLatents) -> int:
        """Input channels of a token."""
        return 4 * latents.channels

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        with evaluating(*self.text.encoders):
            embeds, pooled = self.text.embed(prompts)
        device = next(self.module.parameters()).device
        tensors, shared = self._pictures(tasks)
        tensors = {"embeds": embeds, "pooled": pooled, **tensors}
        return Conditioning({name: tensor.to(device) for name, tensor in tensors.items()}, shared=shared)

    def _pictures(self, tasks: Sequence[Task]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What is read of the tasks' pictures, and the common sizes."""
        return {}, {"size": (128 * self.latents.latent_pixels,) * 2 if self.size is None else self.size}

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        tokens, places = self._input(x, conditioning)
        dtype, tensors = next(module.parameters()).dtype, conditioning.tensors
        output: Tensor = module(
            hidden_states=tokens.to(dtype),
            # The pipelines hand timesteps over in thousandths and divide again; the rounding reaches the highest frequencies.
            timestep=sigma * 1000 / 1000,
            guidance=torch.full((len(x),), self.guidance, device=x.device) if self._distilled else None,
            pooled_projections=tensors["pooled"].to(dtype),
            encoder_hidden_states=tensors["embeds"].to(dtype),
            txt_ids=torch.zeros(tensors["embeds"].shape[1], 3, device=x.device),
            img_ids=places.to(x.device),
            joint_attention_kwargs=attention_inputs(module, conditioning),
            return_dict=False,
        )[0]
        return output[:, : x.shape[1]].float()

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        """The transformer's tokens, those of x first, and their places (picture, row, column)."""
        return x, places(self.latents.grid(conditioning.shared["size"]))


def places(grid: tuple[int, int], *, picture: int = 0) -> Float[Tensor, "t 3"]:
    """(picture, row, column) of each token of a grid, row by row."""
    height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(rows, picture), rows, columns], dim=-1).reshape(-1, 3).float()
