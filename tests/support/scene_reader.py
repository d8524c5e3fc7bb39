"""A parser that reads the edits from the words of an instruction, the list of all single edits, and random edits of a scene."""

import re

import torch

from retouch_worlds.playground.scenes import COLOURS, PLACES, SHAPES, THINGS, Edit, Scene, Thing, edits_of_kinds, random_kinds

COLOUR, SHAPE, PLACE = (f"({'|'.join(words)})" for words in (COLOURS, SHAPES, PLACES))
COLOURED_SHAPE = rf"{COLOUR} {SHAPE}"
CLAUSES = {
    "recolour": rf"(?:make|paint|change the colour of|recolour) the {COLOURED_SHAPE}(?: to| in)? {COLOUR}\b",
    "reshape": rf"(?:turn|change|make|reshape) the {COLOURED_SHAPE} (?:into a|a|to a) {SHAPE}\b",
    "remove": rf"(?:remove|delete|take away|erase) the {COLOURED_SHAPE}\b",
    "add": rf"(?:add|put|draw|place) a {COLOURED_SHAPE} at the {PLACE}\b",
    "move": rf"(?:move|shift|bring|drag) the {COLOURED_SHAPE} (?:over )?to the {PLACE}\b",
}

Meaning = tuple[str, ...]


def read(text: str) -> set[Meaning]:
    """Return the edits that a text requests."""
    return {(kind, *found) for kind, clause in CLAUSES.items() for found in re.findall(clause, text)}


def meaning(edit: Edit) -> Meaning:
    """Return the meaning of an edit in the form that ``read`` returns."""
    last = {"recolour": edit.result and edit.result.colour, "reshape": edit.result and edit.result.shape, "remove": None}
    end = last.get(edit.kind, PLACES[edit.to_cell])
    return (edit.kind, *edit.thing, *([] if end is None else [end]))


def all_single_edits() -> list[Edit]:
    """Return one edit for every possible meaning."""
    edits = []
    for thing in THINGS:
        edits += [Edit("recolour", 0, thing, 0, Thing(colour, thing.shape)) for colour in COLOURS if colour != thing.colour]
        edits += [Edit("reshape", 0, thing, 0, Thing(thing.colour, shape)) for shape in SHAPES if shape != thing.shape]
        edits += [Edit("remove", 0, thing, 0, None)]
        edits += [Edit("add", cell, thing, cell, thing) for cell in range(9)]
        edits += [Edit("move", (cell + 1) % 9, thing, cell, thing) for cell in range(9)]
    return edits


def random_edits(scene: Scene, complexity: int, generator: torch.Generator) -> tuple[Edit, ...]:
    """Draw ``complexity`` random edits that are possible in the scene. Raises ValueError if 1000 draws give none."""
    for _ in range(1000):
        edits = edits_of_kinds(scene, random_kinds(complexity, generator), generator)
        if edits is not None:
            return edits
    raise ValueError(f"no {complexity} edits found for {scene}; it needs more things or more empty cells")
