"""Latents of the Qwen-Image family.

A picture of (height, width) px becomes 16 latent channels of (height / 8, width / 8), normalised channel by channel and packed
2 x 2 into tokens: (r, height / 16 * width / 16, 64). Other autoencoders give other factors.
"""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.frozen import evaluating
from retouch.models.common.latents import Size, pack, unpack
from retouch.models.common.single_frame import for_single_frames


class QwenLatents:
    """Pictures to packed latents and back, through a frozen autoencoder, which is from then on one for single frames."""

    def __init__(self, vae: AutoencoderKLQwenImage) -> None:
        for_single_frames(vae)
        self.vae = vae
        self.channels: int = vae.config.z_dim
        self.token_pixels: int = 2 * 2 ** len(vae.temperal_downsample)
        self._images = VaeImageProcessor(vae_scale_factor=self.token_pixels)
        shape = (1, self.channels, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean).view(shape)
        self._std = torch.tensor(vae.config.latents_std).view(shape)

    def grid(self, size: Size) -> tuple[int, int, int]:
        """(1, height, width) in tokens of a picture of ``size`` px. ValueError where the sides do not divide."""
        if size[0] % self.token_pixels or size[1] % self.token_pixels or min(size) < self.token_pixels:
            raise ValueError(
                f"a picture of {size[0]} x {size[1]} px (height x width) does not divide into tokens of {self.token_pixels} px; "
                "give sides that are multiples of it"
            )
        return 1, size[0] // self.token_pixels, size[1] // self.token_pixels

    def resize(self, image: Image, size: Size) -> Image:
        """The picture at ``size``, as the pipelines resize (Lanczos)."""
        return image if (image.height, image.width) == size else self._images.resize(image, *size)

    def encode(self, images: Sequence[Image], size: Size) -> Float[Tensor, "r s d"]:
        """Mode of the posterior, normalised and packed, fp32, on the autoencoder's device."""
        self.grid(size)
        pixels = torch.cat([self._images.preprocess(image, *size) for image in images]).unsqueeze(2)
        with evaluating(self.vae):
            posterior = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist
        latents = posterior.mode()[:, :, 0].float()
        return pack((latents - self._mean.to(latents.device)) / self._std.to(latents.device))

    def decode(self, tokens: Float[Tensor, "r s d"], size: Size) -> list[Image]:
        """The pictures of clean tokens."""
        _, height, width = self.grid(size)
        latents = unpack(tokens.to(self.vae.device, torch.float32), height=height, width=width)
        latents = latents * self._std.to(latents.device) + self._mean.to(latents.device)
        with evaluating(self.vae):
            pixels = self.vae.decode(latents.unsqueeze(2).to(self.vae.dtype)).sample[:, :, 0]
        pictures: list[Image] = self._images.postprocess(pixels.float())
        return pictures
