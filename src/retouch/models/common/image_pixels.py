"""Converts PIL images to the tensors that image tokenizers read, (r, 3, h, w) in fp32 from -1 to 1, and back."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from PIL.Image import Image, Resampling, fromarray
from torch import Tensor


def to_pixels(images: Sequence[Image], size: tuple[int, int], device: torch.device) -> Float[Tensor, "r 3 h w"]:
    """Convert images to RGB tensors, resized to ``size``, (height, width) in pixels (Lanczos)."""
    height, width = size
    resized = [image.convert("RGB").resize((width, height), Resampling.LANCZOS) for image in images]
    levels = torch.stack([torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in resized])
    return levels.reshape(-1, height, width, 3).permute(0, 3, 1, 2).to(device) / 127.5 - 1


def to_images(pixels: Float[Tensor, "r 3 h w"]) -> list[Image]:
    """Convert tensors to PIL images; values outside -1 to 1 are clipped."""
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [fromarray(each) for each in levels]
