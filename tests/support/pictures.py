"""Images of noise, and images as the bytes of a file."""

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (20, 16), *, mode: str = "RGB") -> Image.Image:
    """Return an image of noise that depends on the seed. ``size``: width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of a file with the image."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()
