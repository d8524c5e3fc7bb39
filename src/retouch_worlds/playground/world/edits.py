"""Edits of a scene. There are five kinds of edits, and an instruction has one or several edits.

The edits of an instruction change different cells, and all refer to the scene before the edits. A thing that an edit creates does
not occur in the scene yet, so that no reference is ambiguous and the order of the edits does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from retouch.types import Json
from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.scenes import CELLS, CODES, COLOURS, SHAPES, THINGS, Scene, Thing

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["recolour", "reshape", "remove", "add", "move"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_EDITS = 4
_MOST_THINGS = 4
_MOST_ADDED = 2


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: the ``thing`` in ``cell`` (for ``add``, the new thing) becomes ``result`` in ``to_cell``.

    ``remove`` has no result. ``to_cell`` differs from ``cell`` only for ``move``.
    """

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

    Raises ValueError if ``complexity`` is not 1 to 4.
    """
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
