"""FLUX.2-klein, text to image and editing, as diffusers' Flux2KleinPipeline runs it.

x is (r, s, 128) packed tokens in fp32. A conditioning has "embeds" (r, L, d) for the text and, for tasks with images, "source"
(r, S, 128), the latents of these reference images. ``shared`` has "size", the output's (height, width) in px, and "sources", the
sizes of the reference images.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Model

from retouch.models.parts import Source, load_parts
from retouch.models.pipeline import PackedLatents, PipelineModel, Size, common_size
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task
from retouch_models.chat_template import Qwen3Text

REFERENCE_AREA = 1024 * 1024
"""Maximum area of a reference image in px; a larger image is resized."""


class Flux2Text(Qwen3Text):
    """The concatenated states of three layers of Qwen3. The transformer attends to the padding too, as in the pipeline."""

    FAMILY = "FLUX.2-klein"
    LAYERS = (9, 18, 27)
    THINKING = False
    PADDING = "max_length"


class Flux2Latents(PackedLatents):
    """Latents that are normalised channel by channel with the running statistics of the autoencoder's batch norm."""

    def noise(self, size: Size, generators: Sequence[torch.Generator], device: torch.device | str) -> Float[Tensor, "r s d"]:
        shape = (1, 4 * self.channels, *self.grid(size))
        rows = [randn_tensor(shape, generator=generator, device=device, dtype=torch.float32) for generator in generators]
        return torch.cat(rows).flatten(2).transpose(1, 2)

    def normalise(self, tokens: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        return (tokens - self.vae.bn.running_mean.float()) / self._deviation()

    def denormalise(self, tokens: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        return tokens * self._deviation() + self.vae.bn.running_mean.float()

    def _deviation(self) -> Float[Tensor, " d"]:
        return torch.sqrt(self.vae.bn.running_var.float() + self.vae.config.batch_norm_eps)

    def reference(self, image: Image) -> Image:
        """Prepare a reference image as the pipeline does: at most ``REFERENCE_AREA`` px, center-cropped to whole tokens."""
        scale = math.sqrt(REFERENCE_AREA / (image.width * image.height))
        if scale < 1:
            image = image.resize((int(image.width * scale), int(image.height * scale)), Resampling.LANCZOS)
        width, height = (side // self.token_pixels * self.token_pixels for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


class Flux2Klein(PipelineModel):
    """FLUX.2-klein: an image from a prompt and any number of reference images.

    ``size``: (height, width) of the output in px. None is the size of the first reference image or, without reference images, the
    pipeline's 1024 x 1024. ``distilled``: the weights are step-distilled, and their pipeline uses no guidance.

    Raises ``ValueError`` for FLUX.2-dev's transformer, which takes guidance as an input.

    Source: diffusers' Flux2KleinPipeline.
    """

    latents: Flux2Latents
    text: Flux2Text

    def __init__(
        self, *, transformer: Flux2Transformer2DModel, vae: AutoencoderKLFlux2, distilled: bool = False, **rest: Any
    ) -> None:
        if transformer.config.guidance_embeds:
            raise ValueError("this transformer takes guidance as an input, as FLUX.2-dev's does; use the weights of FLUX.2-klein")
        super().__init__(transformer=transformer, latents=Flux2Latents(vae), **rest)
        self.distilled = distilled

    @classmethod
    def from_pretrained(
        cls, path: Source, *, dtype: torch.dtype, device: torch.device | str, size: Size | None = None
    ) -> "Flux2Klein":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline; everything but the transformer is
        frozen."""
        kinds = {"transformer": Flux2Transformer2DModel, "vae": AutoencoderKLFlux2, "text_encoder": Qwen3Model}
        parts = load_parts(path, dtype=dtype, device=device, **kinds, tokenizer=Qwen2Tokenizer)
        return cls(
            transformer=parts["transformer"],
            vae=parts["vae"],
            text=Flux2Text(parts["text_encoder"], parts["tokenizer"]),
            scheduler_config=parts["scheduler"],
            size=size,
            distilled=parts["index"].get("is_distilled", False),
        )

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The empty prompt with the same reference images. Raises ``ValueError`` for step-distilled weights."""
        if self.distilled:
            raise ValueError("step-distilled weights sample without guidance; set guidance_scale to 1, or use FLUX.2-klein-base")
        return super().encode_negative(tasks)

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        embeds, _ = self.text.embed(prompts)
        return {"embeds": embeds}

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        tensors = self.read_prompts(prompts)
        images = [[self.latents.reference(image) for image in task.images] for task in tasks]
        sizes = common_size([tuple((image.height, image.width) for image in row) for row in images], tasks)
        size = self.size or (sizes[0] if sizes else (128 * self.latents.latent_pixels,) * 2)
        return self.conditioning(tensors, size=size, images=images, sizes=sizes)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r s d"]:
        """Encode images of the output. Without a fixed ``size``, they are resized and cropped as reference images are."""
        return super().encode_images(images if self.size is not None else [self.latents.reference(image) for image in images])

    def shift(self, tokens: int, num_steps: int) -> float:
        return float(compute_empirical_mu(tokens, num_steps))

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        dtype, tensors, shared = compute_dtype(module), conditioning.tensors, conditioning.shared
        grids = [self.latents.grid(size) for size in (shared["size"], *shared["sources"])]
        output: Tensor = module(
            hidden_states=torch.cat([x, tensors["source"]], dim=1).to(dtype) if shared["sources"] else x.to(dtype),
            # The pipelines also multiply sigma by 1000 and divide again; the rounding changes high frequencies of the embedding.
            timestep=sigma * 1000 / 1000,
            encoder_hidden_states=tensors["embeds"].to(dtype),
            txt_ids=_places(0, 1, 1, tensors["embeds"].shape[1]).to(x.device),
            img_ids=torch.cat([_places(10 * k, *grid, 1) for k, grid in enumerate(grids)]).to(x.device),
            return_dict=False,
        )[0]
        return output[:, : x.shape[1]].float()


def _places(image: int, height: int, width: int, length: int) -> Float[Tensor, "t 4"]:
    """(image, row, column, position in the text) of each token: the output is image 0, the references are 10, 20 and so on."""
    axes = torch.tensor([image]), torch.arange(height), torch.arange(width), torch.arange(length)
    return torch.cartesian_prod(*axes).float()
