"""FLUX.1-Fill generates the masked part of an image anew.

With each token of the noise (64 channels), the transformer reads the image without its masked part (64 channels) and the mask (256
channels).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.latents import PackedLatents, Size, pack
from retouch.models.common.pipeline_model import common_size
from retouch.models.flux.model import Flux, positions
from retouch.types import Conditioning, Task


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
