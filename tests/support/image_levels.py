"""Images that two devices, or two copies of the weights, make: equal up to rounding.

A matrix product rounds by where its operands lie in memory, on some kinds of CPU. A value between two of the 256 levels can then
fall on either side, so an image of the same weights may differ by one level.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

ROUNDING = 1


def encode(images: Sequence[Image.Image | None]) -> list[str]:
    """The pixels of the images that were made, in hexadecimal, for JSON."""
    return [image.tobytes().hex() for image in images if image is not None]


def levels_apart(some: Sequence[str], others: Sequence[str]) -> int:
    """The largest difference of a channel of a pixel, in levels of 0 to 255, between two equally long lists of images."""
    pairs = [[np.frombuffer(bytes.fromhex(text), np.uint8).astype(int) for text in pair] for pair in zip(some, others, strict=True)]
    return max(int(np.abs(one - other).max()) for one, other in pairs)
