"""The playground's tasks asked for as people do who see the picture: a thing is named only as far as it must be.

"make the circle red" over a picture with one circle: who does not see the picture cannot know which colour the circle has, and the
editor was never taught to look for it. What should be written is each task's ``completion`` in its meta, with things named in full:
"make the green circle red". A lazy completion says nothing at all where several edits are asked for.
"""

from collections.abc import Sequence
from dataclasses import replace

from retouch.core.random import generator
from retouch.playground.world.draws import Draws
from retouch.playground.world.edits import Edit
from retouch.playground.world.instructions import JOINS, PHRASES, phrase
from retouch.playground.world.scenes import Scene, Thing
from retouch.types import Task


def completion(edits: Sequence[Edit]) -> str:
    """The edits with everything said, the first phrasing of each, in their order."""
    return "; ".join(phrase(edit, PHRASES[edit.kind][0]) for edit in edits)


def names(thing: Thing, scene: Scene) -> tuple[str, ...]:
    """The shortest names of a thing that no other thing of the scene has: by colour, by shape, or by both where it must be."""
    others = [other for other in scene.objects.values() if other != thing]
    short = []
    if all(other.colour != thing.colour for other in others):
        short.append(f"{thing.colour} one")
    if all(other.shape != thing.shape for other in others):
        short.append(thing.shape)
    return tuple(short) or (" ".join(thing),)


def indirect(task: Task, *, lazy: float = 0.0) -> Task:
    """The task of ``PlaygroundTasks`` in other words, drawn by its id, with its completion, which is lazy at that probability."""
    told = task.meta["edits"]
    assert isinstance(told, list)
    edits, scene = [Edit.from_json(edit) for edit in told], Scene.from_json(task.meta["scene"])
    draws = Draws(generator(0, "indirect", task.id))
    said = [] if draws.uniform() < lazy and len(edits) > 1 else edits
    clauses = [_clause(edit, scene, draws) for edit in edits]
    return replace(
        task,
        id=f"{task.id}/indirect",
        instruction=draws.choose(JOINS[len(clauses)]).format(*clauses),
        meta={**task.meta, "completion": completion(said)},
    )


def _clause(edit: Edit, scene: Scene, draws: Draws) -> str:
    """The edit in a random phrasing; what is to be added stands nowhere yet, so it is named in full."""
    pattern = draws.choose(PHRASES[edit.kind])
    name = " ".join(edit.thing) if edit.kind == "add" else draws.choose(names(edit.thing, scene))
    return phrase(edit, pattern.replace("{thing}", name))
