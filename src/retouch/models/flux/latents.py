"""Masks as Flux's transformer takes them.

A mask is not shrunk as pictures are: each of its pixels becomes a channel, 256 a token.
"""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.models.common.latents import PackedLatents, Size, pack


class FluxLatents(PackedLatents):
    """Pictures to packed latents and back, through a frozen autoencoder; and masks."""

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__(vae)
        self._masks = VaeImageProcessor(
            vae_scale_factor=self.token_pixels, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )

    def mask(self, masks: Sequence[Image], size: Size) -> Float[Tensor, "r 1 h w"]:
        """1 where the picture is to change, 0 where it is to stay."""
        return torch.cat([self._masks.preprocess(mask, *size) for mask in masks])

    def pack_mask(self, mask: Float[Tensor, "r 1 h w"]) -> Float[Tensor, "r s d"]:
        """Each latent's pixels become channels, and these are packed like latents: FLUX.1-Fill's own layout."""
        return pack(torch.nn.functional.pixel_unshuffle(mask, self.latent_pixels))
