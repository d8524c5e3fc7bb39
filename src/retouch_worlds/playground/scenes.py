"""The playground's scenes: coloured shapes on a grey canvas; and edits of scenes.

A canvas has 24 x 24 pixels in 3 x 3 cells of 8 x 8 pixels, numbered 0 to 8 row by row from the top left. A cell is empty or
contains one thing. The 64 pixels of a cell depend only on its thing and the background. A (colour, shape) pair occurs at most once
in a scene, so "the red circle" is never ambiguous.

There are five kinds of edits, and an instruction has one or several edits. The edits of an instruction change different cells, and
all refer to the scene before the edits. A thing that an edit creates does not occur in the scene yet, so that no reference is
ambiguous and the order of the edits does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from retouch.types import Json

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Numbers: TypeAlias = Sequence[int] | Mapping[int, float]
"""The numbers of edits or things that a task may have: successive tasks take the numbers of a sequence in turn; a mapping gives the
weights of a random draw."""

_BLOCK = 48


class RandomChoices:
    """Random choices with a generator. It draws blocks of numbers, because single draws are slow. Equal generators give equal
    choices."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._block: list[float] = []

    def uniform(self) -> float:
        """A number in [0, 1)."""
        if not self._block:
            import torch

            self._block = torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        return self._block.pop()

    def integer(self, n: int) -> int:
        """A whole number from 0 to n - 1, uniformly."""
        return int(self.uniform() * n)

    def choose(self, options: Sequence[T]) -> T:
        """One of the options, uniformly."""
        return options[self.integer(len(options))]

    def sample(self, options: Sequence[T], k: int) -> list[T]:
        """k different options in random order."""
        left = list(options)
        return [left.pop(self.integer(len(left))) for _ in range(k)]

    def number(self, numbers: Numbers, index: int) -> int:
        """The number of edits or things of task ``index``. Nothing is drawn if ``numbers`` is a sequence."""
        if not isinstance(numbers, Mapping):
            return numbers[index % len(numbers)]
        point = self.uniform() * sum(numbers.values())
        for number, weight in numbers.items():
            point -= weight
            if point < 0:
                return number
        return max(number for number, weight in numbers.items() if weight > 0)


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


Kind: TypeAlias = Literal["recolour", "reshape", "remove", "add", "move"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_EDITS = 4
_MOST_THINGS = 4
_MOST_ADDED = 2


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: the ``thing`` in ``cell`` (for ``add``, the new thing) becomes ``result`` in ``to_cell``. ``remove`` has no
    result. ``to_cell`` differs from ``cell`` only for ``move``."""

    kind: Kind
    cell: int
    thing: Thing
    to_cell: int
    result: Thing | None

    def __post_init__(self) -> None:
        thing, result = self.thing, self.result
        right = {
            "recolour": result is not None and result.shape == thing.shape and result != thing,
            "reshape": result is not None and result.colour == thing.colour and result != thing,
            "remove": result is None,
            "add": result == thing,
            "move": result == thing,
        }
        if not right.get(self.kind, False) or (self.to_cell != self.cell) != (self.kind == "move"):
            raise ValueError(f"not an edit of the kind {self.kind!r}: {thing} in {self.cell} to {result} in {self.to_cell}")
        if thing not in CODES or result not in CODES or not 0 <= self.cell < CELLS or not 0 <= self.to_cell < CELLS:
            raise ValueError(f"an edit with an unknown thing or cell: {thing} in {self.cell} to {result} in {self.to_cell}")

    @property
    def touches(self) -> tuple[int, ...]:
        """The cells that the edit changes."""
        return (self.cell,) if self.cell == self.to_cell else (self.cell, self.to_cell)

    @property
    def creates(self) -> Thing | None:
        """The thing, a (colour, shape) pair, that the edit creates; None if it creates none."""
        return self.result if self.kind in ("recolour", "reshape", "add") else None

    def to_json(self) -> dict[str, Json]:
        """A flat dictionary of the fields."""
        result: Json = None if self.result is None else list(self.result)
        return {"kind": self.kind, "cell": self.cell, "thing": list(self.thing), "to_cell": self.to_cell, "result": result}

    @classmethod
    def from_json(cls, value: Json) -> Edit:
        """The inverse of ``to_json``. Raises ValueError if the value is not an edit."""
        match value:
            case {
                "kind": str(kind),
                "cell": int(cell),
                "thing": [str(colour), str(shape)],
                "to_cell": int(to_cell),
                "result": ([str(), str()] | None) as result,
            }:
                return cls(kind, cell, Thing(colour, shape), to_cell, None if result is None else Thing(*result))  # type: ignore[arg-type]
        raise ValueError(f"not an edit: {value!r}")


def apply(scene: Scene, edits: Sequence[Edit]) -> Scene:
    """The scene after the edits. Raises ValueError if the edits do not fit the scene, conflict, or leave the scene empty."""
    cells = list(scene.cells)
    touched: set[int] = set()
    known = {thing for thing in scene.cells if thing is not None}
    for edit in edits:
        before = None if edit.kind == "add" else edit.thing
        if scene.cells[edit.cell] != before or (edit.kind == "move" and scene.cells[edit.to_cell] is not None):
            raise ValueError(f"{edit} does not fit {scene}: the thing must be in its cell, and the cell it moves to must be empty")
        if not touched.isdisjoint(edit.touches):
            raise ValueError(f"{edit} touches a cell that another edit of the instruction touches")
        if edit.creates is not None:
            if edit.creates in known:
                raise ValueError(f"{edit} creates a second {' '.join(edit.creates)}; references to it would be ambiguous")
            known.add(edit.creates)
        touched.update(edit.touches)
        cells[edit.cell] = None
        cells[edit.to_cell] = edit.result
    if not any(cells):
        raise ValueError("the edits leave an empty scene")
    return Scene(scene.background, tuple(cells))


def random_kinds(complexity: int, generator: torch.Generator) -> tuple[Kind, ...]:
    """The kinds of ``complexity`` edits, drawn uniformly. They are drawn again if no scene of 2 to 4 things can have such edits.
    Raises ValueError if ``complexity`` is not 1 to 4."""
    if not 1 <= complexity <= MOST_EDITS:
        raise ValueError(f"complexity is the number of edits in an instruction, 1 to {MOST_EDITS}, not {complexity}")
    choices = RandomChoices(generator)
    while True:
        kinds = tuple(choices.choose(KINDS) for _ in range(complexity))
        if kinds.count("add") <= _MOST_ADDED and kinds.count("remove") < _MOST_THINGS:
            return kinds


def things_needed(kinds: Sequence[Kind]) -> int:
    """The smallest number of things, at least 2, that a scene needs for edits of these kinds."""
    named = sum(kind != "add" for kind in kinds)
    return max(2, named + (kinds.count("remove") == len(kinds)))


def edits_of_kinds(scene: Scene, kinds: Sequence[Kind], generator: torch.Generator) -> tuple[Edit, ...] | None:
    """Random edits of these kinds, in this order. None if the draw failed; another draw or another scene may succeed."""
    choices = RandomChoices(generator)
    objects = scene.objects
    named = choices.sample(list(objects), len(objects))
    free = choices.sample(scene.empty, len(scene.empty))
    known = set(objects.values())
    edits: list[Edit] = []
    for kind in kinds:
        if kind == "add":
            options: Sequence[Thing | None] = [new for new in THINGS if new not in known]
            cell = to_cell = free.pop() if free else -1
        elif not named:
            return None
        else:
            cell = to_cell = named.pop()
            options = _results(kind, objects[cell], known)
            if kind == "move":
                to_cell = free.pop() if free else -1
        if not options or to_cell < 0:
            return None
        result = choices.choose(options)
        thing = result if kind == "add" else objects[cell]
        assert thing is not None
        known.add(result or thing)
        edits.append(Edit(kind, cell, thing, to_cell, result))
    left = len(objects) + kinds.count("add") - kinds.count("remove")
    return tuple(edits) if left > 0 else None


def _results(kind: Kind, thing: Thing, known: set[Thing]) -> Sequence[Thing | None]:
    """The possible results of an edit of this kind for the thing; ``known`` things are excluded."""
    if kind == "recolour":
        return [made for colour in COLOURS if (made := Thing(colour, thing.shape)) not in known]
    if kind == "reshape":
        return [made for shape in SHAPES if (made := Thing(thing.colour, shape)) not in known]
    return [None] if kind == "remove" else [thing]


def impossible_edit(scene: Scene, edits: Sequence[Edit], generator: torch.Generator) -> Edit:
    """A random edit of a thing that is not in the scene and that ``edits`` do not create, so that the edit is impossible."""
    choices = RandomChoices(generator)
    known = {*scene.objects.values(), *(edit.creates for edit in edits)}
    thing = choices.choose([thing for thing in THINGS if thing not in known])
    kind = choices.choose([kind for kind in KINDS if kind != "add"])
    cell, to_cell = choices.sample(range(CELLS), 2)
    result = choices.choose(_results(kind, thing, {thing}))
    return Edit(kind, cell, thing, to_cell if kind == "move" else cell, result)
