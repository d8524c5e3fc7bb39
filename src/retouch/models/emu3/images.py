"""Emu3's image tokenizer (MoVQGAN, arXiv 2209.09002): converts images to grids of codes, and back."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor
from transformers import Emu3VQVAE

from retouch.models.common.image_pixels import to_images, to_pixels
from retouch.models.common.parts import evaluating, without_tf32


class Emu3ImageTokenizer:
    """A frozen image tokenizer for images of one ``size``, (height, width) in pixels.

    ``grid``: (height, width) in codes: the size divided by the autoencoder's factor (8). Raises ValueError if the size is not a
    multiple of this factor.

    Source: Emu3 (arXiv 2409.18869), whose tokenizer extends MoVQGAN (arXiv 2209.09002).
    """

    def __init__(self, vq: Emu3VQVAE, size: tuple[int, int]) -> None:
        self.vq = vq.requires_grad_(False).eval()
        self.size = size
        factor = self.vq.spatial_scale_factor
        if size[0] % factor or size[1] % factor:
            raise ValueError(f"size {size}: sides must be multiples of {factor} px, the autoencoder's factor")
        self.grid = (size[0] // factor, size[1] // factor)

    def encode(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Encode images, which are first resized to ``size`` (Lanczos), to codes. Computes in fp32 without TF32."""
        sizes = torch.tensor([self.size] * len(images))
        with evaluating(self.vq), without_tf32():
            codes = self.vq.encode(to_pixels(images, self.size, self.vq.device), sizes, return_dict=True).image_tokens
        return torch.stack(list(codes)).long()

    def decode(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        with evaluating(self.vq):
            return to_images(self.vq.decode(codes.to(self.vq.device)))
