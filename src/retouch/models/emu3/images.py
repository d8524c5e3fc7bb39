"""Emu3's autoencoder: pictures as grids of codes, and back."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor
from transformers import Emu3VQVAE

from retouch.models.common.code_pixels import pictures, pixels
from retouch.models.common.frozen import evaluating


class Emu3Pictures:
    """Pictures of one ``size``, (height, width) in px, through a frozen autoencoder that shrinks each side by its own factor (8).

    ``grid``: (height, width) in codes. ValueError where the size is no multiple of the factor.
    """

    def __init__(self, vq: Emu3VQVAE, size: tuple[int, int]) -> None:
        self.vq = vq.requires_grad_(False).eval()
        self.size = size
        factor = self.vq.spatial_scale_factor
        if size[0] % factor or size[1] % factor:
            raise ValueError(f"size {size}: sides must be multiples of {factor} px, the autoencoder's factor")
        self.grid = (size[0] // factor, size[1] // factor)

    def encode(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Pictures as codes, at ``size`` (Lanczos)."""
        sizes = torch.tensor([self.size] * len(images))
        with evaluating(self.vq):
            codes = self.vq.encode(pixels(images, self.size, self.vq.device), sizes, return_dict=True).image_tokens
        return torch.stack(list(codes)).long()

    def decode(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Codes as pictures."""
        with evaluating(self.vq):
            return pictures(self.vq.decode(codes.to(self.vq.device)))
