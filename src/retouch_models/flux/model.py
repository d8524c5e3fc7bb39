"""FLUX.1, text to image, FLUX.1-Fill (inpainting) and FLUX.1-Kontext (editing), as diffusers runs them.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, max_sequence_length, 4096), T5's last hidden states without a
mask (the transformer also reads the padding), "pooled" (r, 768), CLIP's pooled output, and "source" for models that read a source
image. ``shared`` has "size", the output's (height, width) in px, and "sources", the sizes of the source images. FLUX.1-Fill reads
with each token of the noise (64 channels) the image without its masked part (64 channels) and the mask (256 channels).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from jaxtyping import Float, Int
from PIL.Image import Image
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase, T5EncoderModel, T5Tokenizer

from retouch.models.parts import Scheduler, Source, diffusers_folder, load_parts
from retouch.models.pipeline import PackedLatents, PipelineModel, Size, common_size, pack, padded_ids, reference_inputs
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task


class FluxText:
    """CLIP and T5 with their tokenizers. ``max_sequence_length``: T5's number of tokens, up to 512.

    Source: diffusers' FluxPipeline (``encode_prompt``).
    """

    def __init__(
        self,
        clip: CLIPTextModel,
        t5: T5EncoderModel,
        *,
        clip_tokenizer: PreTrainedTokenizerBase,
        t5_tokenizer: PreTrainedTokenizerBase,
        max_sequence_length: int = 512,
    ) -> None:
        if not 1 <= max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length is {max_sequence_length}; T5 takes 1 to 512 tokens here")
        self.clip = clip
        self.t5 = t5
        self.clip_tokenizer = clip_tokenizer
        self.t5_tokenizer = t5_tokenizer
        self.max_sequence_length = max_sequence_length

    @property
    def encoders(self) -> list[nn.Module]:
        return [self.clip, self.t5]

    def check(self, prompt: str, task: str) -> None:
        """Raise ValueError if the prompt is longer than T5 reads. (CLIP may truncate it, as in the pipelines.)"""
        tokens = len(self.t5_tokenizer(prompt, verbose=False)["input_ids"])
        if tokens > self.max_sequence_length:
            raise ValueError(
                f"the prompt of task {task!r} has {tokens} tokens, but T5 reads at most {self.max_sequence_length}; shorten it"
            )

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Float[Tensor, "r e"]]:
        """Return embeds and pooled in fp32, each on its encoder's device; with gradient if gradients are enabled."""
        return self.read(*self.tokenise(prompts))

    def tokenise(self, prompts: Sequence[str]) -> tuple[Int[Tensor, "r k"], Int[Tensor, "r l"]]:
        """Return CLIP's token ids and T5's token ids."""
        return (
            padded_ids(self.clip_tokenizer, prompts, self.clip_tokenizer.model_max_length),
            padded_ids(self.t5_tokenizer, prompts, self.max_sequence_length),
        )

    def read(self, clip_ids: Int[Tensor, "r k"], t5_ids: Int[Tensor, "r l"]) -> tuple[Float[Tensor, "r l d"], Float[Tensor, "r e"]]:
        """Return embeds and pooled for the ids that ``tokenise`` returns."""
        pooled: Tensor = self.clip(clip_ids.to(self.clip.device)).pooler_output.float()
        embeds: Tensor = self.t5(t5_ids.to(self.t5.device)).last_hidden_state.float()
        return embeds, pooled


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
        kinds: dict[str, Any] = {"transformer": FluxTransformer2DModel, "vae": AutoencoderKL}
        if isinstance(path, Path | str):
            configs = [kind.load_config(diffusers_folder(path) / name) for name, kind in kinds.items()]
        else:
            configs = [path.components[name].config for name in kinds]
        transformer, vae = configs
        cls._check(transformer, vae, guidance)  # before gigabytes are read
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
        dtype, tensors = compute_dtype(module), conditioning.tensors
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


class FillLatents(PackedLatents):
    """Packed latents, and packed masks. A mask is not encoded like an image: each of its pixels becomes a channel, 256 per token.

    Source: diffusers' FluxFillPipeline (``prepare_mask_latents``).
    """

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__(vae)
        self._masks = VaeImageProcessor(
            vae_scale_factor=self.token_pixels, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )

    def mask(self, masks: Sequence[Image], size: Size) -> Float[Tensor, "r 1 h w"]:
        """Convert masks to tensors: 1 where the image changes, 0 where it is kept."""
        return torch.cat([self._masks.preprocess(mask, *size) for mask in masks])

    def pack_mask(self, mask: Float[Tensor, "r 1 h w"]) -> Float[Tensor, "r s d"]:
        """Pack a mask: the pixels of each latent become channels, and these are packed like latents."""
        return pack(torch.nn.functional.pixel_unshuffle(mask, self.latent_pixels))


class FluxFill(Flux):
    """FLUX.1-Fill. ``size``: (height, width) in px to which source and mask are resized; None takes the source's size.

    Raises ``ValueError`` for a task without exactly one image or without a mask, and if sizes differ between tasks.

    Source: diffusers' FluxFillPipeline.
    """

    GUIDANCE: ClassVar[float] = 30.0
    FILLS_MASKS: ClassVar[bool] = True
    LATENTS: ClassVar[type[PackedLatents]] = FillLatents
    latents: FillLatents

    @classmethod
    def _channels(cls, vae: Mapping[str, Any]) -> int:
        return 2 * super()._channels(vae) + 4 * FillLatents.geometry(vae)[1] ** 2

    def with_images(self, tasks: Sequence[Task], tensors: Mapping[str, Tensor]) -> Conditioning:
        masks = []
        for task in tasks:
            if len(task.images) != 1 or task.mask is None:
                having = f"{len(task.images)} images and {'a' if task.mask is not None else 'no'} mask"
                raise ValueError(f"task {task.id!r} has {having}; FluxFill takes one image and a mask")
            masks.append(task.mask)
        size = common_size([self.fit(task.images[0]) if self.size is None else self.size for task in tasks], tasks)
        mask = self.latents.mask(masks, size)
        kept = self.latents.encode(self.latents.pixels([task.images[0] for task in tasks], size) * (1 - mask))
        source = torch.cat([kept, self.latents.pack_mask(mask).to(kept.device)], dim=2)
        return self.conditioning({**tensors, "source": source}, size=size)

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        return torch.cat([x, conditioning.tensors["source"]], dim=2), positions(self.latents.grid(conditioning.shared["size"]))


class FluxKontext(Flux):
    """FLUX.1-Kontext. ``size``: (height, width) of the output in px; None takes the size to which the source is resized (``fit``).

    ``source_as_is``: the source keeps its own size, rounded down to whole tokens. Raises ``ValueError`` for a task without exactly
    one image, and if sizes differ between tasks.

    Source: FLUX.1 Kontext (arXiv 2506.15742) and diffusers' FluxKontextPipeline.
    """

    GUIDANCE: ClassVar[float] = 3.5
    source_as_is: bool = False

    def with_images(self, tasks: Sequence[Task], tensors: Mapping[str, Tensor]) -> Conditioning:
        for task in tasks:
            if len(task.images) != 1:
                raise ValueError(f"task {task.id!r} has {len(task.images)} images; FluxKontext takes one")
        source = common_size([self.fit(task.images[0]) for task in tasks], tasks)
        size = source if self.size is None else self.size
        return self.conditioning(tensors, size=size, images=[task.images for task in tasks], sizes=[source])

    def fit(self, image: Image) -> Size:
        """Return the training size with the nearest aspect ratio (``source_as_is``: the image's size), rounded to whole tokens."""
        width, height = image.size
        if not self.source_as_is:
            _, width, height = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        side = self.latents.token_pixels
        return height // side * side, width // side * side

    def _input(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> tuple[Float[Tensor, "r t e"], Float[Tensor, "t 3"]]:
        output, source = (self.latents.grid(size) for size in (conditioning.shared["size"], *conditioning.shared["sources"]))
        tokens = torch.cat([x, conditioning.tensors["source"]], dim=1)
        return tokens, torch.cat([positions(output), positions(source, image=1)])
