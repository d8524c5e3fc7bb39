"""Pictures and masks as Flux's transformer takes them.

A picture of (height, width) px becomes 16 latent channels of (height / 8, width / 8), shifted and scaled, packed 2 x 2 into tokens:
(r, height / 16 * width / 16, 64). A mask is not shrunk: each of its pixels becomes a channel, 256 a token.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.frozen import evaluating
from retouch.models.qwen_image.layout import pack, unpack

Size: TypeAlias = tuple[int, int]


class FluxLatents:
    """Pictures to packed latents and back, through a frozen autoencoder."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self.vae = vae
        self.channels: int = vae.config.latent_channels
        self.latent_pixels: int = 2 ** (len(vae.config.block_out_channels) - 1)
        self.token_pixels: int = 2 * self.latent_pixels
        self._images = VaeImageProcessor(vae_scale_factor=self.token_pixels)
        self._masks = VaeImageProcessor(
            vae_scale_factor=self.token_pixels, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )

    def grid(self, size: Size) -> tuple[int, int]:
        """(height, width) in tokens of a picture of ``size`` px. ValueError where the sides do not divide."""
        if size[0] % self.token_pixels or size[1] % self.token_pixels or min(size) < self.token_pixels:
            raise ValueError(
                f"a picture of {size[0]} x {size[1]} px (height x width) does not divide into tokens of {self.token_pixels} px; "
                "give sides that are multiples of it"
            )
        return size[0] // self.token_pixels, size[1] // self.token_pixels

    def pixels(self, images: Sequence[Image], size: Size) -> Float[Tensor, "r 3 h w"]:
        """-1 to 1, resized as the pipelines resize (Lanczos)."""
        self.grid(size)
        return torch.cat([self._images.preprocess(image, *size) for image in images])

    def encode(self, pixels: Float[Tensor, "r 3 h w"]) -> Float[Tensor, "r s d"]:
        """Mode of the posterior, shifted, scaled and packed, fp32, on the autoencoder's device."""
        config = self.vae.config
        with evaluating(self.vae):
            latents = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist.mode().float()
        return pack((latents - config.shift_factor) * config.scaling_factor)

    def decode(self, tokens: Float[Tensor, "r s d"], size: Size) -> list[Image]:
        """The pictures of clean tokens."""
        height, width = self.grid(size)
        latents = unpack(tokens.to(self.vae.device, torch.float32), height=height, width=width)
        latents = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        with evaluating(self.vae):
            pixels = self.vae.decode(latents.to(self.vae.dtype)).sample
        pictures: list[Image] = self._images.postprocess(pixels.float())
        return pictures

    def noise(self, size: Size, generators: Sequence[torch.Generator], device: torch.device | str) -> Float[Tensor, "r s d"]:
        """Packed noise for pictures of ``size`` px, a row from each generator, drawn as the pipelines draw it."""
        height, width = self.grid(size)
        shape = (1, self.channels, 2 * height, 2 * width)
        rows = [randn_tensor(shape, generator=generator, device=device, dtype=torch.float32) for generator in generators]
        return pack(torch.cat(rows))

    def mask(self, masks: Sequence[Image], size: Size) -> Float[Tensor, "r 1 h w"]:
        """1 where the picture is to change, 0 where it is to stay."""
        return torch.cat([self._masks.preprocess(mask, *size) for mask in masks])

    def pack_mask(self, mask: Float[Tensor, "r 1 h w"]) -> Float[Tensor, "r s d"]:
        """Each latent's pixels become channels, and these are packed like latents: FLUX.1-Fill's own layout."""
        return pack(torch.nn.functional.pixel_unshuffle(mask, self.latent_pixels))
