"""The playground's scenes: coloured shapes on a grey canvas.

A canvas has 24 x 24 pixels in 3 x 3 cells of 8 x 8 pixels, numbered 0 to 8 row by row from the top left. A cell is empty or
contains one thing. The 64 pixels of a cell depend only on its thing and the background. A (colour, shape) pair occurs at most once
in a scene, so "the red circle" is never ambiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from retouch.types import Json
from retouch_worlds.playground.world.choices import RandomChoices

if TYPE_CHECKING:
    import torch

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
    """A coloured shape; a cell contains at most one thing."""

    colour: str
    shape: str


THINGS = tuple(Thing(colour, shape) for colour in COLOURS for shape in SHAPES)
CODES: dict[Thing | None, int] = {None: 0, **{thing: code for code, thing in enumerate(THINGS, start=1)}}


@dataclass(frozen=True, slots=True)
class Scene:
    """A background (0 to 3, dark to light) and the thing in each of the nine cells, or None."""

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
        """The scene as ``{"background": 1, "objects": [[0, "red", "circle"], ...]}``, with objects in the order of the cells."""
        return {"background": self.background, "objects": [[cell, *thing] for cell, thing in self.objects.items()]}

    @classmethod
    def from_json(cls, value: Json) -> Scene:
        """The inverse of ``to_json``. Raises ValueError if the value is not a scene."""
        match value:
            case {"background": int(background), "objects": list(objects)}:
                cells: list[Thing | None] = [None] * CELLS
                for entry in objects:
                    match entry:
                        case [int(cell), str(colour), str(shape)] if 0 <= cell < CELLS and cells[cell] is None:
                            cells[cell] = Thing(colour, shape)
                        case _:
                            raise ValueError(f"an object of a scene is [cell, colour, shape] in an empty cell, not {entry!r}")
                return cls(background, tuple(cells))
        raise ValueError(f'a scene is {{"background": number, "objects": list}}, not {value!r}')


def random_scene(generator: torch.Generator, *, least: int = 2, most: int = 4) -> Scene:
    """A random scene of ``least`` to ``most`` things; every number of things is equally likely."""
    choices = RandomChoices(generator)
    things = choices.sample(THINGS, least + choices.integer(most - least + 1))
    cells: list[Thing | None] = [None] * CELLS
    for cell, thing in zip(choices.sample(range(CELLS), len(things)), things, strict=True):
        cells[cell] = thing
    return Scene(choices.integer(len(BACKGROUNDS)), tuple(cells))
