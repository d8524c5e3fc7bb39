"""Compares images that were generated on two devices, or with two copies of the weights; they are equal except for rounding.

On some CPUs the rounding of a matrix product depends on the memory alignment of its operands. A value between two of the 256 levels
can then be rounded up or down, so images from the same weights can differ by one level.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

ROUNDING = 1


def encode(images: Sequence[Image.Image | None]) -> list[str]:
    """Return the pixels of all images that are not None, in hexadecimal, for JSON."""
    return [image.tobytes().hex() for image in images if image is not None]


def max_level_difference(some: Sequence[str], others: Sequence[str]) -> int:
    """Return the largest difference of a channel of a pixel, in levels of 0 to 255, between two equally long lists of images."""
    pairs = [[np.frombuffer(bytes.fromhex(text), np.uint8).astype(int) for text in pair] for pair in zip(some, others, strict=True)]
    return max(int(np.abs(one - other).max()) for one, other in pairs)
