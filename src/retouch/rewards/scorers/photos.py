"""The ``photos`` reward: preservation of a photograph, times closeness to a colour. It needs no model, only the images.

Images are (h, w, 3), 0 to 1, float64. They are scored one at a time, so that a score does not depend on the rest of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from PIL import Image
from pydantic import Field

from retouch.config.section import Count, NonNegative
from retouch.rewards.base import RewardSection, source_image
from retouch.rewards.scorers.pixels import LUMA, to_tensor
from retouch.types import Column, Json, Sample, Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Byte: TypeAlias = Annotated[int, Field(ge=0, le=255)]
Colour: TypeAlias = tuple[Byte, Byte, Byte]

CONTRAST_FLOOR = 0.03  # the noise of an autoencoder, about 4 of 255, must not count as structure
FLOOR = 0.02
_COLOURS: dict[str, Json] = {
    "red": [255, 0, 0],
    "green": [0, 255, 0],
    "blue": [0, 0, 255],
    "white": [255, 255, 255],
    "black": [0, 0, 0],
}


class PhotosReward(RewardSection):
    """Preservation of the source image, times closeness to a colour. Columns, each 0 to 1:

    ``preservation``: 1 - sqrt(1 - max(r, 0)), where r = (mean n m + e) / sqrt((mean n^2 + e) (mean m^2 + e)), e = 0.02, is the
    correlation of the luminance structure of the image, n, with the structure of its source, m: sqrt(1 - r) is their RMS distance
    at equal strength. Structure is (luminance - local mean) / (local standard deviation + 0.03), where local means a box of about
    an eighth of the shorter side. The column is exactly 1 for an unchanged image, slightly lower after a change of all colours, and
    near 0 for a flat or an unrelated image. ``colour``: 1 - d / d_max, where d is the distance of the mean colour to ``colour``,
    and d_max the distance of ``colour`` to the farthest corner of the colour cube. ``reward``: preservation ** preserve * colour.

    Example::

        >>> reward = retouch.rewards.Photos(colour=(255, 0, 0))
        >>> round(retouch.score(reward, image, source=image)["reward"], 3)
        1.0
    """

    kind: Literal["photos"] = "photos"
    colour: Colour
    """Target colour: red, green and blue, 0 to 255."""
    preserve: NonNegative = 1.0
    """Exponent of the preservation: 0 ignores the source image; a higher value preserves more of it."""
    side: Count | None = Field(default=None, exclude_if=lambda side: side is None)
    """Both images are shrunk to this many pixels on the shorter side before their structures are compared, so that the layout
    counts and fine detail does not; null compares the structures at the size of the image."""

    columns: ClassVar[Mapping[str, Column]] = {
        "preservation": Column(0.0, 1.0),
        "colour": Column(0.0, 1.0),
        "reward": Column(0.0, 1.0),
    }
    cli_key = "colour"
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image scores 0.

        A source image of another size is resized to the size of the image. Raises ValueError if a task has no source image.
        """
        import torch

        table = torch.zeros(len(samples), 2, dtype=torch.float64)
        for row, sample in enumerate(samples):
            source = source_image(sample.task)
            if sample.image is not None:
                table[row, 0] = _preservation(
                    *(self._shrunk(image) for image in (at_size(source, sample.image.size), sample.image))
                )
                table[row, 1] = self._closeness(sample.image)
        preservation, colour = table.unbind(dim=1)
        scores = {"preservation": preservation, "colour": colour, "reward": preservation**self.preserve * colour}
        return {name: column.float() for name, column in scores.items()}

    @classmethod
    def from_cli(cls, argument: str) -> Json:
        """Parse a colour: a name or ``#rrggbb``. Raises ValueError for other texts."""
        if re.fullmatch(r"#[0-9a-fA-F]{6}", argument):
            return list(bytes.fromhex(argument[1:]))
        if argument not in _COLOURS:
            raise ValueError(f"photos:{argument}: give a colour: {', '.join(_COLOURS)}, or #rrggbb")
        return _COLOURS[argument]

    def _shrunk(self, image: Image.Image) -> Image.Image:
        if self.side is None or self.side >= min(image.size):
            return image
        width, height = (max(1, round(length * self.side / min(image.size))) for length in image.size)
        return image.convert("RGB").resize((width, height), Image.Resampling.BOX)

    def _closeness(self, image: Image.Image) -> Float[Tensor, ""]:
        import torch

        colour = torch.tensor(self.colour, dtype=torch.float64) / 255
        farthest = torch.maximum(colour, 1 - colour).norm()
        distance = (to_tensor(image).mean(dim=(0, 1)) - colour).norm()
        closeness: Tensor = 1 - (distance / farthest).clamp(max=1)
        return closeness


def at_size(source: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The source image at ``size`` (width, height), resized with Lanczos if it has another size."""
    return source if source.size == size else source.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _preservation(source: Image.Image, image: Image.Image) -> Float[Tensor, ""]:
    """Compute the column ``preservation`` for a source and an image of the same size."""
    before, after = _structure(source), _structure(image)
    energy = (before.square().mean() + FLOOR) * (after.square().mean() + FLOOR)
    correlation = ((before * after).mean() + FLOOR) / energy.sqrt()
    distance: Tensor = (1 - correlation).clamp(0, 1).sqrt()
    return 1 - distance


def _structure(image: Image.Image) -> Float[Tensor, "h w"]:
    import torch

    luminance = to_tensor(image) @ torch.tensor(LUMA, dtype=torch.float64)
    radius = max(1, min(luminance.shape) // 16)
    mean = _local_mean(luminance, radius)
    variance = (_local_mean(luminance.square(), radius) - mean.square()).clamp(min=0)
    return (luminance - mean) / (variance.sqrt() + CONTRAST_FLOOR)


def _local_mean(values: Float[Tensor, "h w"], radius: int) -> Float[Tensor, "h w"]:
    """Return the mean over the box of (2 radius + 1)^2 pixels around each pixel; pixels outside the image do not count."""
    import torch

    for axis in (0, 1):
        length = values.shape[axis]
        place = torch.arange(length)
        low, high = (place - radius).clamp(min=0), (place + radius + 1).clamp(max=length)
        total = torch.nn.functional.pad(values.cumsum(dim=axis), (1, 0) if axis else (0, 0, 1, 0))
        count = (high - low).view((-1, 1) if axis == 0 else (1, -1))
        values = (total.index_select(axis, high) - total.index_select(axis, low)) / count
    return values
