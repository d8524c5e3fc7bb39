"""Pictures as tensors, for judges that look at pixels."""

import numpy as np
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor


def to_tensor(image: Image) -> Float[Tensor, "h w 3"]:
    """Red, green and blue of every pixel, 0 to 1, float64."""
    pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(pixels.astype(np.float64)) / 255
