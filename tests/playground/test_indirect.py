"""Indirect instructions: one meaning each, in words that the editor never met, and what should be written for them."""

from retouch.playground.edits import Edit
from retouch.playground.indirect import COLOUR_WORDS, INDIRECT, PLACE_WORDS, SHAPE_WORDS, IndirectTasks, completion, indirect
from retouch.playground.instructions import content, vocabulary
from retouch.playground.scenes import COLOURS, PLACES, SHAPES, Scene, Thing
from retouch.playground.tasks import PlaygroundTasks

TASKS = PlaygroundTasks(seed=2, count=300, complexity=[1, 2, 3], split="train")


def edits_of(task):
    return [Edit.from_json(edit) for edit in task.meta["edits"]]


def test_what_is_asked_stays_the_same_in_other_words():
    for task, other in zip(TASKS, IndirectTasks(TASKS), strict=True):
        assert other.instruction != task.instruction
        assert other.id.startswith(task.id)
        assert (other.tags, other.meta["scene"], other.meta["edits"]) == (task.tags, task.meta["scene"], task.meta["edits"])
        assert other.target.tobytes() == task.target.tobytes()
        assert sorted(other.meta["completion"].split("; ")) == content(edits_of(task)).split(" + ")
        assert indirect(task).instruction == other.instruction


def test_names_are_words_that_the_editor_never_met():
    names = {word for name in (*COLOUR_WORDS.values(), *SHAPE_WORDS.values(), *PLACE_WORDS) for word in name.split()}
    assert names.isdisjoint(vocabulary())
    assert len(set(COLOUR_WORDS.values()) | set(SHAPE_WORDS.values()) | set(PLACE_WORDS)) == 6 + 3 + 9
    assert len(PLACE_WORDS) == len(PLACES)


def clauses(edit):
    result = edit.result or edit.thing
    names = {"at": PLACE_WORDS[edit.cell], "to": PLACE_WORDS[edit.to_cell]}
    names |= {"colour": COLOUR_WORDS[result.colour], "shape": SHAPE_WORDS[result.shape]}
    return {pattern.format(**names) for pattern in INDIRECT[edit.kind]}


def all_edits(scene):
    for cell, thing in scene.objects.items():
        yield Edit("remove", cell, thing, cell, None)
        yield from (Edit("move", cell, thing, to, thing) for to in scene.empty)
        yield from (Edit("recolour", cell, thing, cell, Thing(c, thing.shape)) for c in COLOURS if c != thing.colour)
        yield from (Edit("reshape", cell, thing, cell, Thing(thing.colour, s)) for s in SHAPES if s != thing.shape)
    for cell in scene.empty:
        yield from (Edit("add", cell, Thing(c, s), cell, Thing(c, s)) for c in COLOURS for s in SHAPES)


def test_with_the_picture_a_clause_means_one_edit_and_without_it_many():
    by_clause = {}
    for task in TASKS[:40]:
        meant = {}
        for edit in all_edits(Scene.from_json(task.meta["scene"])):
            for clause in clauses(edit):
                assert meant.setdefault(clause, edit) == edit
                by_clause.setdefault(clause, set()).add(completion([edit]))
        for clause, edit in zip(indirect(task).instruction.split(" | "), edits_of(task), strict=True):
            assert meant[clause] == edit
    assert max(len(completions) for completions in by_clause.values()) > 5


def test_slices_and_single_tasks_agree():
    tasks = IndirectTasks(TASKS)
    assert [task.id for task in tasks[2:5]] == [tasks[k].id for k in range(2, 5)]
    assert len(tasks) == len(TASKS)
