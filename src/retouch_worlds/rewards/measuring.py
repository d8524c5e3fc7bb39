"""The measurements of the playground's judges: distances between the cells of an image and the templates of all objects.

A distance is the root mean square difference over the 192 values of a cell, in units of the full range (0 to 1). Squared distances
are sums of integers, exact in float64, so that a score does not depend on the rest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from retouch.types import Sample
from retouch_worlds.playground.world.rendering import TEMPLATES
from retouch_worlds.playground.world.scenes import BACKGROUNDS, CELL, CELLS, GRID, SIZE

# DEAD is 7.7 of 255, so that the noise of an autoencoder (about 4) costs nothing. Two objects on the same background differ by more
# than DEAD + SCALE.
DEAD = 0.03
SCALE = 0.09
OBJECT_WEIGHT = 3.0
EXACT_QUALITY = 7.0

VALUES = CELL * CELL * 3
CELL_TEMPLATES: Float[ndarray, "4 19 192"] = TEMPLATES.reshape(len(BACKGROUNDS), -1, VALUES).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class CellReading:
    """The content of images: the background, and for each cell the code of the nearest template on it, with its distance."""

    backgrounds: Int[ndarray, " b"]
    nearest: Int[ndarray, "b 9"]
    distance: Float[ndarray, "b 9"]

    @classmethod
    def of(cls, cells: Float[ndarray, "b 9 192"]) -> "CellReading":
        """Read cells with values 0 to 255. The background is the one with the smallest sum of squared distances of the cells to
        their nearest templates."""
        squares = (cells**2).sum(-1)[..., None, None] + (CELL_TEMPLATES**2).sum(-1)
        squares = squares - 2 * (cells @ CELL_TEMPLATES.reshape(-1, VALUES).T).reshape(squares.shape)
        backgrounds = squares.min(-1).sum(1).argmin(-1)
        squares = np.take_along_axis(squares, backgrounds[:, None, None, None], axis=2)[:, :, 0]
        return cls(backgrounds, squares.argmin(-1), np.sqrt(squares.min(-1) / VALUES) / 255)


def image_cells(samples: Sequence[Sample], usable: Bool[ndarray, " b"]) -> Float[ndarray, "b 9 192"]:
    """Cut the images into cells, 0 to 255; images that are not ``usable`` are black."""
    stack = np.zeros((len(samples), SIZE, SIZE, 3), dtype=np.uint8)
    for row, sample in enumerate(samples):
        if usable[row] and sample.image is not None:
            stack[row] = np.asarray(sample.image if sample.image.mode == "RGB" else sample.image.convert("RGB"))
    cells = stack.reshape(-1, GRID, CELL, GRID, CELL, 3).transpose(0, 1, 3, 2, 4, 5)
    return cells.reshape(-1, CELLS, VALUES).astype(np.float64)


def distance(a: Float[ndarray, "b 9 192"], b: Float[ndarray, "b 9 192"]) -> Float[ndarray, "b 9"]:
    """Return the root mean square difference of each cell, 0 to 1. ``a``, ``b``: 0 to 255."""
    return np.sqrt(((a - b) ** 2).sum(-1) / VALUES) / 255


def keep(distance: Float[ndarray, "b 9"]) -> Float[ndarray, "b 9"]:
    """Return 1 for distances up to ``DEAD``, 0 from ``DEAD + SCALE`` on, and linear values between."""
    return 1 - np.clip((distance - DEAD) / SCALE, 0, 1)


def quality(reading: CellReading) -> Float[ndarray, " b"]:
    """Return the image quality, 0 to 10: 10 x the mean of ``keep`` over the cells; 0 if no cell shows an object."""
    kept = keep(reading.distance)
    shown = ((reading.nearest > 0) & (kept > 0)).any(-1)
    return 10 * kept.mean(-1) * shown
