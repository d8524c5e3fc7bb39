"""How much of a photograph is still there, and how near it came to a colour: a judge that needs nothing but the pictures.

Pictures are (h, w, 3) in 0 to 1, in float64, one at a time, so that a score does not depend on what else is in the batch.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from retouch.rewards.scorers.pixels import to_tensor
from retouch.types import Column, Sample, Scores

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
CONTRAST_FLOOR = 0.03  # an autoencoder's noise, about 4 of 255, is no structure
FLOOR = 0.02


class PhotosReward:
    """``colour``: red, green and blue to come near to, 0 to 255. ``preserve``: the power of preservation in the reward, 0 or more.

    Columns, each 0 to 1:

    - ``preservation``: 1 - sqrt(1 - max(r, 0)), where r = (mean n m + e) / sqrt((mean n^2 + e) (mean m^2 + e)), e = 0.02, is the
      correlation of the luminance structure of the picture, n, with that of its source, m: sqrt(1 - r) is their RMS distance at
      equal strength. Structure is luminance less its local mean, over its local standard deviation plus 0.03; local is a box of
      about an eighth of the shorter side. Exactly 1 for an unchanged picture, little less after a change of all colours, near 0
      for a flat or an unrelated picture in place of one with detail.
    - ``colour``: 1 - d / d_max, with d the distance of the mean colour to ``colour`` and d_max that of the cube's farthest corner.
    - ``reward``: preservation ** preserve * colour.

    A source of another size is resized to the picture's (Lanczos). A sample without a picture is the policy's own fault: 0.
    ValueError: a task without a source, or arguments out of range.
    """

    columns: Mapping[str, Column] = {
        "preservation": Column(0.0, 1.0),
        "colour": Column(0.0, 1.0),
        "reward": Column(0.0, 1.0),
    }

    def __init__(self, *, colour: Sequence[int], preserve: float = 1.0) -> None:
        if len(colour) != 3 or not all(0 <= part <= 255 for part in colour):
            raise ValueError(f"colour {list(colour)}: give red, green and blue, each 0 to 255")
        if not 0 <= preserve < math.inf:
            raise ValueError(f"preserve {preserve}: the power must be 0 or more, and finite")
        self._colour = torch.tensor(colour, dtype=torch.float64) / 255
        self._farthest = torch.maximum(self._colour, 1 - self._colour).norm()
        self.preserve = preserve

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32."""
        table = torch.zeros(len(samples), 2, dtype=torch.float64)
        for row, sample in enumerate(samples):
            if not sample.task.images:
                raise ValueError(f"task {sample.task.id!r} has no source picture, to which this reward compares")
            if sample.image is not None:
                table[row, 0] = _preservation(sample.task.images[0], sample.image)
                table[row, 1] = self._nearness(sample.image)
        preservation, colour = table.unbind(dim=1)
        scores = {"preservation": preservation, "colour": colour, "reward": preservation**self.preserve * colour}
        return {name: column.float() for name, column in scores.items()}

    def _nearness(self, image: Image.Image) -> Float[Tensor, ""]:
        distance = (to_tensor(image).mean(dim=(0, 1)) - self._colour).norm()
        nearness: Tensor = 1 - (distance / self._farthest).clamp(max=1)
        return nearness


def _preservation(source: Image.Image, image: Image.Image) -> Float[Tensor, ""]:
    if source.size != image.size:
        source = source.convert("RGB").resize(image.size, Image.Resampling.LANCZOS)
    before, after = _structure(source), _structure(image)
    energy = (before.square().mean() + FLOOR) * (after.square().mean() + FLOOR)
    correlation = ((before * after).mean() + FLOOR) / energy.sqrt()
    apart: Tensor = (1 - correlation).clamp(0, 1).sqrt()
    return 1 - apart


def _structure(image: Image.Image) -> Float[Tensor, "h w"]:
    luminance = to_tensor(image) @ torch.tensor(LUMA, dtype=torch.float64)
    radius = max(1, min(luminance.shape) // 16)
    mean = _local_mean(luminance, radius)
    variance = (_local_mean(luminance.square(), radius) - mean.square()).clamp(min=0)
    return (luminance - mean) / (variance.sqrt() + CONTRAST_FLOOR)


def _local_mean(values: Float[Tensor, "h w"], radius: int) -> Float[Tensor, "h w"]:
    """The mean over the box of (2 radius + 1)^2 pixels around each one, as much of it as lies inside."""
    for axis in (0, 1):
        length = values.shape[axis]
        place = torch.arange(length)
        low, high = (place - radius).clamp(min=0), (place + radius + 1).clamp(max=length)
        total = torch.nn.functional.pad(values.cumsum(dim=axis), (1, 0) if axis else (0, 0, 1, 0))
        count = (high - low).view((-1, 1) if axis == 0 else (1, -1))
        values = (total.index_select(axis, high) - total.index_select(axis, low)) / count
    return values
