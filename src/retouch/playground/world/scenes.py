"""The playground's world: coloured shapes on a grey canvas, and how they look.

A canvas is 24 x 24 pixels in 3 x 3 cells of 8, numbered 0 to 8 row by row from the top left. A cell is empty or holds one thing,
always drawn with the same 64 pixels; a (colour, shape) pair occurs at most once in a scene, so "the red circle" is never ambiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy import ndarray
from PIL import Image

from retouch.playground.world.draws import Draws
from retouch.types import Json

GRID = 3
CELL = 8
SIZE = GRID * CELL
CELLS = GRID * GRID

COLOURS = {
    "red": (225, 25, 25),
    "green": (10, 200, 30),
    "blue": (35, 55, 235),
    "yellow": (250, 230, 15),
    "pink": (250, 20, 200),
    "cyan": (15, 220, 235),
}
SHAPES = ("circle", "square", "triangle")
BACKGROUNDS = (40, 95, 150, 205)
PLACES = (
    "top left",
    "top middle",
    "top right",
    "middle left",
    "centre",
    "middle right",
    "bottom left",
    "bottom middle",
    "bottom right",
)


class Thing(NamedTuple):
    """What a cell may hold."""

    colour: str
    shape: str


THINGS = tuple(Thing(colour, shape) for colour in COLOURS for shape in SHAPES)
CODES: dict[Thing | None, int] = {None: 0, **{thing: code for code, thing in enumerate(THINGS, start=1)}}


@dataclass(frozen=True, slots=True)
class Scene:
    """A background (0 to 3, dark to light) and what each of the nine cells holds."""

    background: int
    cells: tuple[Thing | None, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.background < len(BACKGROUNDS) or len(self.cells) != CELLS:
            raise ValueError(f"a scene has a background from 0 to 3 and nine cells, not {self.background} and {len(self.cells)}")
        things = [thing for thing in self.cells if thing is not None]
        if unknown := [thing for thing in things if thing not in CODES]:
            raise ValueError(f"unknown things {unknown}; colours are {list(COLOURS)} and shapes {list(SHAPES)}")
        if len(set(things)) < len(things):
            raise ValueError(f"a thing occurs twice in {things}; a reference to it would be ambiguous")

    @property
    def objects(self) -> dict[int, Thing]:
        """The things by cell, in the order of the cells."""
        return {cell: thing for cell, thing in enumerate(self.cells) if thing is not None}

    @property
    def empty(self) -> list[int]:
        """The empty cells."""
        return [cell for cell, thing in enumerate(self.cells) if thing is None]

    def to_json(self) -> dict[str, Json]:
        """``{"background": 1, "objects": [[0, "red", "circle"], ...]}``, objects in the order of the cells."""
        return {"background": self.background, "objects": [[cell, *thing] for cell, thing in self.objects.items()]}

    @classmethod
    def from_json(cls, value: Json) -> "Scene":
        """The scene of ``to_json``. ValueError where the value is no scene."""
        match value:
            case {"background": int(background), "objects": list(objects)}:
                cells: list[Thing | None] = [None] * CELLS
                for entry in objects:
                    match entry:
                        case [int(cell), str(colour), str(shape)] if 0 <= cell < CELLS and cells[cell] is None:
                            cells[cell] = Thing(colour, shape)
                        case _:
                            raise ValueError(f"an object of a scene is [cell, colour, shape] in a cell of its own, not {entry!r}")
                return cls(background, tuple(cells))
        raise ValueError(f'a scene is {{"background": number, "objects": list}}, not {value!r}')


def random_scene(generator: torch.Generator, *, least: int = 2, most: int = 4) -> Scene:
    """A scene of ``least`` to ``most`` things, each number as likely."""
    draws = Draws(generator)
    things = draws.sample(THINGS, least + draws.below(most - least + 1))
    cells: list[Thing | None] = [None] * CELLS
    for cell, thing in zip(draws.sample(range(CELLS), len(things)), things, strict=True):
        cells[cell] = thing
    return Scene(draws.below(len(BACKGROUNDS)), tuple(cells))


def _inside(shape: str, x: Float[ndarray, "n n"], y: Float[ndarray, "n n"]) -> Bool[ndarray, "n n"]:
    """Whether points of a cell (units of pixels, y downwards) lie in the shape."""
    if shape == "circle":
        return np.less_equal((x - 4) ** 2 + (y - 4) ** 2, 3.2**2)
    if shape == "square":
        return np.less_equal(np.maximum(abs(x - 4), abs(y - 4)), 3.5)
    return np.less_equal(np.maximum(abs(y - 4), abs(x - 4) + (7.5 - y) / 2), 3.5)


def _coverage(shape: str) -> Float[ndarray, "8 8"]:
    """The part of each pixel that the shape covers, from 8 x 8 points a pixel."""
    points = (np.arange(CELL * 8) + 0.5) / 8
    y, x = np.meshgrid(points, points, indexing="ij")
    return np.mean(_inside(shape, x, y).reshape(CELL, 8, CELL, 8), axis=(1, 3))


def _templates() -> UInt8[ndarray, "4 19 8 8 3"]:
    """Each code's cell on each background."""
    templates = np.empty((len(BACKGROUNDS), len(CODES), CELL, CELL, 3), dtype=np.uint8)
    covers = {shape: _coverage(shape)[..., None] for shape in SHAPES}
    for background, grey in enumerate(BACKGROUNDS):
        templates[background, 0] = grey
        for thing in THINGS:
            cover = covers[thing.shape]
            templates[background, CODES[thing]] = np.rint(grey * (1 - cover) + np.array(COLOURS[thing.colour]) * cover)
    templates.setflags(write=False)
    return templates


TEMPLATES = _templates()


def codes(scenes: Sequence[Scene]) -> Int[ndarray, "n 9"]:
    """What each cell holds as a number: 0 for empty, then the things in the order of ``THINGS``."""
    return np.array([[CODES[thing] for thing in scene.cells] for scene in scenes], dtype=np.int64).reshape(-1, CELLS)


def pixels(scenes: Sequence[Scene]) -> UInt8[ndarray, "n 24 24 3"]:
    """The scenes' pictures as arrays."""
    backgrounds = np.array([scene.background for scene in scenes], dtype=np.int64)
    cells = TEMPLATES[backgrounds[:, None], codes(scenes)].reshape(-1, GRID, GRID, CELL, CELL, 3)
    return np.ascontiguousarray(cells.transpose(0, 1, 3, 2, 4, 5)).reshape(-1, SIZE, SIZE, 3)


def render(scene: Scene) -> Image.Image:
    """The scene's picture, 24 x 24, RGB."""
    return Image.fromarray(pixels([scene])[0])
