"""Pictures as the autoencoders of codes take and give them: (r, 3, h, w) in fp32 from -1 to 1."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from PIL.Image import Image, Resampling, fromarray
from torch import Tensor


def pixels(images: Sequence[Image], size: tuple[int, int], device: torch.device) -> Float[Tensor, "r 3 h w"]:
    """Pictures at ``size``, (height, width) in px (Lanczos)."""
    height, width = size
    resized = [image.convert("RGB").resize((width, height), Resampling.LANCZOS) for image in images]
    levels = torch.stack([torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in resized])
    return levels.reshape(-1, height, width, 3).permute(0, 3, 1, 2).to(device) / 127.5 - 1


def pictures(pixels: Float[Tensor, "r 3 h w"]) -> list[Image]:
    """What lies beyond the range is cut off."""
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [fromarray(each) for each in levels]
