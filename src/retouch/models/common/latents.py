"""Latents as tokens: what the families whose transformers read 2 x 2 latents as one token have in common.

An image of (height, width) px becomes c latent channels of (height / f, width / f) for an autoencoder of factor f, normalised and
packed 2 x 2 into tokens: (r, height / 2f * width / 2f, 4c), channel index c * 4 + dy * 2 + dx.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.frozen import evaluating

Size: TypeAlias = tuple[int, int]
Area: TypeAlias = int | Literal["as_is"]


def pack(latents: Float[Tensor, "r c h w"]) -> Float[Tensor, "r s d"]:
    """Latents to tokens, row by row of 2 x 2 patches."""
    r, c, h, w = latents.shape
    patches = latents.reshape(r, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(r, (h // 2) * (w // 2), c * 4)


def unpack(tokens: Float[Tensor, "r s d"], *, height: int, width: int) -> Float[Tensor, "r c h w"]:
    """Tokens to latents; ``height`` and ``width`` in tokens."""
    r, _, d = tokens.shape
    patches = tokens.reshape(r, height, width, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(r, d // 4, height * 2, width * 2)


def fit(image: Image, area: Area) -> Size:
    """(height, width) that a picture gets: about ``area`` px with its aspect ratio and sides of multiples of 32, or as it is.

    Source: diffusers' Qwen-Image-Edit pipelines.
    """
    if area == "as_is":
        return image.height, image.width
    ratio = image.width / image.height
    width = math.sqrt(area * ratio)
    return round(width / ratio / 32) * 32, round(width / 32) * 32


class PackedLatents:
    """Images to packed latents and back, through a frozen autoencoder that shifts and scales its latents (FLUX.1, Z-Image).

    Subclasses replace ``normalise`` and ``denormalise``.
    """

    def __init__(self, vae: AutoencoderKL | AutoencoderKLFlux2) -> None:
        self.vae = vae
        self.channels: int = vae.config.latent_channels
        self.latent_pixels: int = 2 ** (len(vae.config.block_out_channels) - 1)
        self.token_pixels: int = 2 * self.latent_pixels
        self._images = VaeImageProcessor(vae_scale_factor=self.token_pixels)

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
        """Mode of the posterior, packed and normalised, fp32, on the autoencoder's device."""
        with evaluating(self.vae):
            latents = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist.mode().float()
        return self.normalise(pack(latents))

    def decode(self, tokens: Float[Tensor, "r s d"], size: Size) -> list[Image]:
        """The images of clean tokens."""
        height, width = self.grid(size)
        latents = unpack(self.denormalise(tokens.to(self.vae.device, torch.float32)), height=height, width=width)
        with evaluating(self.vae):
            pixels = self.vae.decode(latents.to(self.vae.dtype)).sample
        images: list[Image] = self._images.postprocess(pixels.float())
        return images

    def noise(self, size: Size, generators: Sequence[torch.Generator], device: torch.device | str) -> Float[Tensor, "r s d"]:
        """Packed noise for images of ``size`` px, a row from each generator, drawn as the pipelines draw it."""
        height, width = self.grid(size)
        shape = (1, self.channels, 2 * height, 2 * width)
        rows = [randn_tensor(shape, generator=generator, device=device, dtype=torch.float32) for generator in generators]
        return pack(torch.cat(rows))

    def normalise(self, tokens: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        """From the autoencoder's scale to the transformer's."""
        return (tokens - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    def denormalise(self, tokens: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        """From the transformer's scale to the autoencoder's."""
        return tokens / self.vae.config.scaling_factor + self.vae.config.shift_factor
