"""Images as tensors of pixels, for rewards that look at pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL.Image import Image

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the luminance (ITU-R BT.601)."""


def to_tensor(image: Image) -> Float[Tensor, "h w 3"]:
    """Red, green and blue of every pixel, 0 to 1, float64."""
    import numpy as np
    import torch

    pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(pixels.astype(np.float64)) / 255
