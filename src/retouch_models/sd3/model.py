"""Stable Diffusion 3 and 3.5, text to image, as diffusers runs them.

x is (r, 16, height / 8, width / 8) latents in fp32. A conditioning has "embeds" (r, 77 + max_sequence_length, 4096): the last but
one hidden states of both CLIP encoders, concatenated along the channels and padded with zeros, followed along the sequence by the
last hidden states of T5. "pooled" (r, 2048) are the projected pooled outputs of both CLIP encoders. An encoder that is left out
gives zeros. ``shared`` has "size", the output's (height, width) in px.
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

from retouch.models.parts import Scheduler, Source, load_parts
from retouch.models.pipeline import Latents, PipelineModel, Size, padded_ids
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task

CLIP_LENGTH = 77
log = logging.getLogger("retouch")


class SD3Text:
    """Two CLIP encoders and T5, each with its tokenizer; None for one that is left out. Raises ValueError if all are None.

    ``joint_dim`` and ``pooled_dim``: widths of embeds and pooled that the transformer takes. ``max_sequence_length``: T5's number
    of tokens, up to 512.

    Source: diffusers' StableDiffusion3Pipeline (``encode_prompt``).
    """

    def __init__(
        self,
        encoders: tuple[CLIPTextModelWithProjection | None, CLIPTextModelWithProjection | None, T5EncoderModel | None],
        tokenizers: Sequence[PreTrainedTokenizerBase | None],
        *,
        joint_dim: int,
        pooled_dim: int,
        max_sequence_length: int,
    ) -> None:
        if all(encoder is None for encoder in encoders):
            raise ValueError("all three text encoders are left out; a prompt needs at least one")
        if [encoder is None for encoder in encoders] != [tokenizer is None for tokenizer in tokenizers]:
            raise ValueError("give three tokenizers in the order of the text encoders, and None for an encoder that is None")
        if not 1 <= max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length is {max_sequence_length}; T5 takes 1 to 512 tokens here")
        *self.clips, self.t5 = encoders
        self.tokenizers = list(tokenizers)
        self.joint_dim = joint_dim
        self.widths = _clip_widths(self.clips, pooled_dim)
        clip_length = CLIP_LENGTH if tokenizers[0] is None else tokenizers[0].model_max_length
        self.lengths = (clip_length, clip_length, max_sequence_length)

    @property
    def encoders(self) -> list[nn.Module]:
        """The encoders that are not left out."""
        return [encoder for encoder in (*self.clips, self.t5) if encoder is not None]

    def check(self, prompt: str, task: str) -> None:
        """Raise ValueError if all encoders would truncate the prompt. (As in the pipeline, CLIP alone may truncate it.)"""
        pairs = [(tokenizer, most) for tokenizer, most in zip(self.tokenizers, self.lengths, strict=True) if tokenizer is not None]
        tokens = [len(tokenizer(prompt, verbose=False)["input_ids"]) for tokenizer, _ in pairs]
        if all(count > most for count, (_, most) in zip(tokens, pairs, strict=True)):
            limits = [most for _, most in pairs]
            raise ValueError(f"the prompt of task {task!r} has {tokens} tokens, but the text encoders read {limits}; shorten it")

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Float[Tensor, "r e"]]:
        """Return embeds and pooled in fp32, on the first encoder's device; with gradient if gradients are enabled."""
        device = next(self.encoders[0].parameters()).device
        states, summaries = [], []
        for clip, tokenizer, width in zip(self.clips, self.tokenizers, self.widths, strict=False):
            if clip is None:
                states.append(torch.zeros(len(prompts), self.lengths[0], width, device=device))
                summaries.append(torch.zeros(len(prompts), width, device=device))
                continue
            output = clip(padded_ids(tokenizer, prompts, self.lengths[0]).to(clip.device), output_hidden_states=True)
            states.append(output.hidden_states[-2].to(device, torch.float32))
            summaries.append(output.text_embeds.to(device, torch.float32))
        words = torch.cat(states, dim=-1)
        words = nn.functional.pad(words, (0, self.joint_dim - words.shape[-1]))
        length = self.lengths[2]
        if self.t5 is None:
            longer = torch.zeros(len(prompts), length, self.joint_dim, device=device)
        else:
            ids = padded_ids(self.tokenizers[2], prompts, length)
            longer = self.t5(ids.to(self.t5.device)).last_hidden_state.to(device, torch.float32)
        return torch.cat([words, longer], dim=1), torch.cat(summaries, dim=-1)


def _clip_widths(clips: Sequence[CLIPTextModelWithProjection | None], pooled_dim: int) -> tuple[int, int]:
    """Return the channels of both CLIP encoders; one that is left out has the remaining channels of the pooled vector."""
    first, second = (None if clip is None else int(clip.config.projection_dim) for clip in clips)
    if first is None:
        return (pooled_dim, 0) if second is None else (pooled_dim - second, second)
    if second is None:
        return first, pooled_dim - first
    if first + second != pooled_dim:
        raise ValueError(f"the CLIP encoders give {first} + {second} pooled channels, but the transformer takes {pooled_dim}")
    return first, second


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
        if t5 is None:
            if isinstance(path, Path | str):
                t5 = (Path(path) / "text_encoder_3").is_dir()
                if not t5:
                    log.info("%s has no text_encoder_3: T5 is left out, and only CLIP reads the prompts", path)
            else:
                t5 = path.components.get("text_encoder_3") is not None
        if t5:
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
        dtype = compute_dtype(module)
        output: Tensor = module(
            hidden_states=x.to(dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=conditioning.tensors["embeds"].to(dtype),
            pooled_projections=conditioning.tensors["pooled"].to(dtype),
            return_dict=False,
        )[0]
        return output.float()
