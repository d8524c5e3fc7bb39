"""Images as the latents that transformers read. Most families read 2 x 2 latents as one token.

An image of (height, width) px becomes c latent channels of (height / f, width / f) for an autoencoder of factor f, normalised and
packed 2 x 2 into tokens: (r, height / 2f * width / 2f, 4c), channel index c * 4 + dy * 2 + dx.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float
from PIL.Image import Image, fromarray
from torch import Tensor

from retouch.models.common.parts import evaluating

Size: TypeAlias = tuple[int, int]
Area: TypeAlias = int | Literal["as_is"]


def pack(latents: Float[Tensor, "r c h w"], side: int = 2) -> Float[Tensor, "r s d"]:
    """Pack latents into tokens: each ``side`` x ``side`` patch becomes one token, row by row.

    Source: ``_pack_latents`` of diffusers' Flux and Qwen-Image pipelines.
    """
    r, c, h, w = latents.shape
    patches = latents.reshape(r, c, h // side, side, w // side, side).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(r, (h // side) * (w // side), c * side**2)


def unpack(tokens: Float[Tensor, "r s d"], *, height: int, width: int, side: int = 2) -> Float[Tensor, "r c h w"]:
    """Unpack tokens into latents; ``height`` and ``width`` are in tokens.

    Source: ``_unpack_latents`` of diffusers' Flux and Qwen-Image pipelines.
    """
    r, _, d = tokens.shape
    patches = tokens.reshape(r, height, width, d // side**2, side, side).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(r, d // side**2, height * side, width * side)


def fit(image: Image, area: Area) -> Size:
    """Return the (height, width) to which an image is resized.

    The size has about ``area`` px, the image's aspect ratio, and sides that are positive multiples of 32. "as_is" keeps the image's
    size.

    Source: diffusers' Qwen-Image-Edit pipelines.
    """
    if area == "as_is":
        return image.height, image.width
    ratio = image.width / image.height
    width = math.sqrt(area * ratio)
    return max(1, round(width / ratio / 32)) * 32, max(1, round(width / 32)) * 32


class Latents:
    """Converts images to x and back with a frozen AutoencoderKL; x is the autoencoder's latents (r, c, h, w), shifted and scaled.

    ``channels``: number of channels of a latent. ``latent_pixels``: side of a latent in px. ``token_pixels``: side in px of a
    token, which has ``token_latents`` x ``token_latents`` latents. Sizes are (height, width) in px. Subclasses override ``pack``
    and ``unpack``, or ``normalise`` and ``denormalise``.
    """

    def __init__(self, vae: Any, *, token_latents: int = 2) -> None:
        self.vae = vae
        self.channels, self.latent_pixels = self.geometry(vae.config)
        self.token_latents, self.token_pixels = token_latents, token_latents * self.latent_pixels
        self._images = VaeImageProcessor(vae_scale_factor=self.token_pixels)

    @staticmethod
    def geometry(config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the number of channels of a latent and its side in px, from the autoencoder's configuration."""
        return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)

    def grid(self, size: Size) -> tuple[int, int]:
        """Convert a size to (height, width) in tokens. Raises ``ValueError`` if a side is not a multiple of ``token_pixels``."""
        side = self.token_pixels
        if size[0] % side or size[1] % side or min(size) < side:
            raise ValueError(
                f"an image of {size[0]} x {size[1]} px (height x width) does not divide into tokens of {side} px; "
                "set policy.model.size (in Python: size=) to sides that are multiples of this number"
            )
        return size[0] // side, size[1] // side

    def resize(self, image: Image, size: Size) -> Image:
        """Resize the image to ``size`` as the diffusers pipelines do (Lanczos)."""
        return image if (image.height, image.width) == size else self._images.resize(image, *size)

    def pixels(self, images: Sequence[Image], size: Size) -> Float[Tensor, "r k h w"]:
        """Convert images to tensors from -1 to 1, resized to ``size`` as in the diffusers pipelines (Lanczos)."""
        self.grid(size)
        return torch.cat([self._images.preprocess(image, *size) for image in images])

    def encode(self, pixels: Float[Tensor, "r k h w"]) -> Float[Tensor, "r ..."]:
        """Encode pixels to clean x: the mode of the posterior, normalised, in fp32, on the autoencoder's device."""
        with evaluating(self.vae):
            latents = self.latents_of(pixels.to(self.vae.device, self.vae.dtype)).float()
        return self.normalise(self.pack(latents))

    def encode_sources(self, images: Sequence[Sequence[Image]], sizes: Sequence[Size]) -> Float[Tensor, "r s d"]:
        """Encode the source images of each row, resized to ``sizes``, to clean x; the tokens of a row's images are concatenated."""
        columns = zip(sizes, zip(*images, strict=True), strict=True)
        return torch.cat([self.encode(self.pixels(column, size)) for size, column in columns], dim=1)

    def decode(self, x: Float[Tensor, "r ..."], size: Size) -> list[Image]:
        """Decode clean x to images."""
        with evaluating(self.vae):
            pixels = self.decode_tensors(x, size)
        # Rounded on the device, as diffusers does on the host: the host then copies and holds a quarter of the bytes.
        levels = (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
        return [fromarray(image.numpy()) for image in levels]

    def decode_tensors(self, x: Float[Tensor, "r ..."], size: Size, *, recompute: bool = False) -> Float[Tensor, "r c h w"]:
        """Decode clean x to images from 0 to 1, with gradient in x.

        ``recompute``: use gradient checkpointing if the autoencoder supports it.
        """
        if recompute and getattr(self.vae, "_supports_gradient_checkpointing", False):
            self.vae.enable_gradient_checkpointing()
        return (self._decoded(x, size) / 2 + 0.5).clamp(0, 1)

    def _decoded(self, x: Float[Tensor, "r ..."], size: Size) -> Float[Tensor, "r k h w"]:
        """Decode clean x to pixels, nominally from -1 to 1; values are not clipped."""
        latents = self.unpack(self.denormalise(x.to(self.vae.device, torch.float32)), size)
        return self.pixels_of(latents.to(self.vae.dtype)).float()

    def noise(self, size: Size, generators: Sequence[torch.Generator], device: torch.device | str) -> Float[Tensor, "r ..."]:
        """Draw x at sigma 1, one row per generator, in the same way as the diffusers pipelines."""
        self.grid(size)
        shape = (1, self.channels, size[0] // self.latent_pixels, size[1] // self.latent_pixels)
        rows = [randn_tensor(shape, generator=generator, device=device, dtype=torch.float32) for generator in generators]
        return self.pack(torch.cat(rows))

    def latents_of(self, pixels: Float[Tensor, "r k h w"]) -> Float[Tensor, "r c y x"]:
        """Encode pixels to the autoencoder's latents: the mode of the posterior."""
        latents: Tensor = self.vae.encode(pixels).latent_dist.mode()
        return latents

    def pixels_of(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r k h w"]:
        """Decode the autoencoder's latents to pixels."""
        pixels: Tensor = self.vae.decode(latents).sample
        return pixels

    def pack(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r ..."]:
        """Convert from the autoencoder's layout to the transformer's."""
        return latents

    def unpack(self, x: Float[Tensor, "r ..."], size: Size) -> Float[Tensor, "r c y x"]:
        """Convert from the transformer's layout to the autoencoder's."""
        return x

    def normalise(self, x: Float[Tensor, "r ..."]) -> Float[Tensor, "r ..."]:
        """Convert from the autoencoder's scale to the transformer's."""
        return (x - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    def denormalise(self, x: Float[Tensor, "r ..."]) -> Float[Tensor, "r ..."]:
        """Convert from the transformer's scale to the autoencoder's."""
        return x / self.vae.config.scaling_factor + self.vae.config.shift_factor


class PackedLatents(Latents):
    """Latents that are packed into tokens (r, s, c * token_latents ** 2)."""

    def pack(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r s d"]:
        return pack(latents, self.token_latents)

    def unpack(self, x: Float[Tensor, "r s d"], size: Size) -> Float[Tensor, "r c y x"]:
        height, width = self.grid(size)
        return unpack(x, height=height, width=width, side=self.token_latents)


class FrameLatents(PackedLatents):
    """Packed latents of a video autoencoder, for which an image is one frame; each channel has its own mean and deviation."""

    def latents_of(self, pixels: Float[Tensor, "r k h w"]) -> Float[Tensor, "r c y x"]:
        latents: Tensor = self.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()[:, :, 0]
        return latents

    def pixels_of(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r k h w"]:
        pixels: Tensor = self.vae.decode(latents.unsqueeze(2)).sample[:, :, 0]
        return pixels

    def normalise(self, x: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        return (x - self._statistic("latents_mean", x)) / self._statistic("latents_std", x)

    def denormalise(self, x: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        return x * self._statistic("latents_std", x) + self._statistic("latents_mean", x)

    def _statistic(self, name: str, x: Tensor) -> Float[Tensor, " d"]:
        return torch.tensor(self.vae.config[name], device=x.device).repeat_interleave(self.token_latents**2)
