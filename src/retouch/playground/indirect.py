"""The playground's tasks asked for indirectly: in words that its editor never met, with things named by where they stand.

Who reads only the instruction cannot say in the editor's words what is meant: the picture shows what stands there. What should be
written is each task's ``completion`` in its meta, in the editor's own words.

"let the north west one be scarlet" over a picture with a green square at the top left: "make the green square red".
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from retouch.core.random import generator
from retouch.playground.draws import Draws
from retouch.playground.edits import Edit, Kind
from retouch.playground.instructions import PHRASES, phrase
from retouch.playground.scenes import COLOURS, PLACES, SHAPES
from retouch.types import Task

COLOUR_WORDS = dict(zip(COLOURS, ("scarlet", "emerald", "navy", "amber", "rose", "teal"), strict=True))
SHAPE_WORDS = dict(zip(SHAPES, ("disc", "box", "wedge"), strict=True))
PLACE_WORDS = ("north west", "north", "north east", "west", "core", "east", "south west", "south", "south east")
INDIRECT: dict[Kind, tuple[str, ...]] = {
    "recolour": ("let the {at} one be {colour}", "{colour} suits the {at} one"),
    "reshape": ("let the {at} one be a {shape}", "a {shape} suits the {at} one"),
    "remove": ("no {at} one", "let the {at} one go"),
    "add": ("let there be a {colour} {shape} {to}", "{to}: a new {colour} {shape}"),
    "move": ("let the {at} one go {to}", "{to} suits the {at} one"),
}
JOIN = " | "
assert len(PLACE_WORDS) == len(PLACES)


def completion(edits: Sequence[Edit]) -> str:
    """The edits in the editor's own words, the first phrasing of each, in their order."""
    return "; ".join(phrase(edit, PHRASES[edit.kind][0]) for edit in edits)


def indirect(task: Task) -> Task:
    """The task of ``PlaygroundTasks`` in other words, drawn by its id, with its completion."""
    told = task.meta["edits"]
    assert isinstance(told, list)
    edits = [Edit.from_json(edit) for edit in told]
    draws = Draws(generator(0, "indirect", task.id))
    clauses = [_clause(edit, draws.choose(INDIRECT[edit.kind])) for edit in edits]
    return replace(
        task,
        id=f"{task.id}/indirect",
        instruction=JOIN.join(clauses),
        meta={**task.meta, "completion": completion(edits)},
    )


def _clause(edit: Edit, pattern: str) -> str:
    result = edit.result or edit.thing
    return pattern.format(
        at=PLACE_WORDS[edit.cell], to=PLACE_WORDS[edit.to_cell], colour=COLOUR_WORDS[result.colour], shape=SHAPE_WORDS[result.shape]
    )


class IndirectTasks(Sequence[Task]):
    """The given tasks, indirectly."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [indirect(task) for task in self.tasks[index]]
        return indirect(self.tasks[index])
