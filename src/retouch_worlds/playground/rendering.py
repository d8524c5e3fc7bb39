"""Images of the playground's scenes."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from numpy import ndarray
from PIL import Image

from retouch_worlds.playground.scenes import BACKGROUNDS, CELL, CELLS, CODES, COLOURS, GRID, SHAPES, SIZE, THINGS, Scene


def _inside(shape: str, x: Float[ndarray, "n n"], y: Float[ndarray, "n n"]) -> Bool[ndarray, "n n"]:
    """Whether points of a cell (in pixels, y downwards) are inside the shape."""
    if shape == "circle":
        return np.less_equal((x - 4) ** 2 + (y - 4) ** 2, 3.2**2)
    if shape == "square":
        return np.less_equal(np.maximum(abs(x - 4), abs(y - 4)), 3.5)
    return np.less_equal(np.maximum(abs(y - 4), abs(x - 4) + (7.5 - y) / 2), 3.5)


def _templates() -> UInt8[ndarray, "4 19 8 8 3"]:
    templates = np.empty((len(BACKGROUNDS), len(CODES), CELL, CELL, 3), dtype=np.uint8)
    points = (np.arange(CELL * 8) + 0.5) / 8
    y, x = np.meshgrid(points, points, indexing="ij")
    # The share of each pixel that a shape covers, computed from 8 x 8 points per pixel.
    covers = {shape: np.mean(_inside(shape, x, y).reshape(CELL, 8, CELL, 8), axis=(1, 3))[..., None] for shape in SHAPES}
    for background, grey in enumerate(BACKGROUNDS):
        templates[background, 0] = grey
        for thing in THINGS:
            cover = covers[thing.shape]
            templates[background, CODES[thing]] = np.rint(grey * (1 - cover) + np.array(COLOURS[thing.colour]) * cover)
    templates.setflags(write=False)
    return templates


TEMPLATES = _templates()


def codes(scenes: Sequence[Scene]) -> Int[ndarray, "n 9"]:
    """The code of each cell: 0 for an empty cell; the things are numbered from 1 in the order of ``THINGS``."""
    return np.array([[CODES[thing] for thing in scene.cells] for scene in scenes], dtype=np.int64).reshape(-1, CELLS)


def pixels(scenes: Sequence[Scene]) -> UInt8[ndarray, "n 24 24 3"]:
    """The images of the scenes as one array."""
    backgrounds = np.array([scene.background for scene in scenes], dtype=np.int64)
    cells = TEMPLATES[backgrounds[:, None], codes(scenes)].reshape(-1, GRID, GRID, CELL, CELL, 3)
    return np.ascontiguousarray(cells.transpose(0, 1, 3, 2, 4, 5)).reshape(-1, SIZE, SIZE, 3)


def render(scene: Scene) -> Image.Image:
    """The image of the scene, 24 x 24 px, RGB."""
    return Image.fromarray(pixels([scene])[0])
