"""Indirect instructions, which have one meaning if the image is known, and their completions."""

from functools import partial

from retouch.data.tasks import MappedTasks
from retouch_worlds.data.indirect import indirect, names
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.playground.world.edits import Edit
from retouch_worlds.playground.world.instructions import JOINS, PHRASES, completion, content, phrase, vocabulary
from retouch_worlds.playground.world.scenes import COLOURS, Scene, Thing

TASKS = PlaygroundData(seed=2, count=150, complexity=[1, 2, 3]).tasks(in_turn=True)[:]


def edits_of(task):
    return [Edit.from_json(edit) for edit in task.meta["edits"]]


def test_indirect_instructions_keep_the_scene_the_edits_and_the_target():
    for task, other in zip(TASKS, MappedTasks(TASKS, indirect), strict=True):
        assert other.id.startswith(task.id)
        assert (other.tags, other.meta["scene"], other.meta["edits"]) == (task.tags, task.meta["scene"], task.meta["edits"])
        assert other.target.tobytes() == task.target.tobytes()
        assert sorted(other.meta["completion"].split("; ")) == content(edits_of(task)).split(" + ")
        assert indirect(task).instruction == other.instruction


def test_indirect_instructions_use_only_the_vocabulary_of_the_editor():
    known = set(vocabulary())
    for task in MappedTasks(TASKS, indirect):
        assert set(task.instruction.replace(",", " ,").replace(";", " ;").split()) <= known


def test_names_are_short_and_identify_one_object_of_the_scene():
    things = (Thing("red", "circle"), Thing("red", "square"), Thing("blue", "circle"), Thing("pink", "triangle"))
    scene = Scene(0, (*things, *[None] * 5))
    assert names(Thing("red", "circle"), scene) == ("red circle",)
    assert names(Thing("red", "square"), scene) == ("square",)
    assert names(Thing("blue", "circle"), scene) == ("blue one",)
    assert names(Thing("pink", "triangle"), scene) == ("pink one", "triangle")


def clauses(edit, scene):
    """Every clause that can express the edit."""
    called = [" ".join(edit.thing)] if edit.kind == "add" else names(edit.thing, scene)
    return {phrase(edit, pattern.replace("{thing}", name)) for pattern in PHRASES[edit.kind] for name in called}


def all_edits(scene):
    for cell, thing in scene.objects.items():
        yield Edit("remove", cell, thing, cell, None)
        yield from (Edit("move", cell, thing, to, thing) for to in scene.empty)
        yield from (Edit("recolour", cell, thing, cell, Thing(c, thing.shape)) for c in COLOURS if c != thing.colour)
        yield from (
            Edit("reshape", cell, thing, cell, Thing(thing.colour, s)) for s in ("circle", "square", "triangle") if s != thing.shape
        )
    for cell in scene.empty:
        yield from (Edit("add", cell, Thing(c, s), cell, Thing(c, s)) for c in COLOURS for s in ("circle", "square", "triangle"))


def test_a_clause_means_one_edit_with_the_image_and_several_without_it():
    by_clause = {}
    for task in TASKS[:60]:
        scene, meant = Scene.from_json(task.meta["scene"]), {}
        for edit in all_edits(scene):
            for clause in clauses(edit, scene):
                assert meant.setdefault(clause, edit) == edit
                by_clause.setdefault(clause, set()).add(completion([edit]))
        edits = edits_of(task)
        said = [[clause for clause in clauses(edit, scene) if clause in indirect(task).instruction] for edit in edits]
        assert all(said)
        wholes = {pattern.format(*(max(found, key=len) for found in said)) for pattern in JOINS[len(edits)]}
        assert indirect(task).instruction in wholes
    assert max(len(completions) for completions in by_clause.values()) > 5


def test_incomplete_completions_are_empty_and_only_for_tasks_with_several_edits():
    incomplete, whole = MappedTasks(TASKS, partial(indirect, incomplete=0.6)), MappedTasks(TASKS, indirect)
    cut = 0
    for task, other in zip(incomplete, whole, strict=True):
        assert task.instruction == other.instruction
        assert task.meta["completion"] in ("", other.meta["completion"])
        assert task.meta["completion"] or len(edits_of(task)) > 1
        cut += task.meta["completion"] != other.meta["completion"]
    compounds = sum(len(edits_of(task)) > 1 for task in TASKS)
    assert 0.45 < cut / compounds < 0.75
