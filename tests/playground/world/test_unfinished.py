"""Demonstrations of several edits whose target lacks one of them."""

from contextlib import suppress
from functools import partial

from retouch.data.tasks import MappedTasks
from retouch_worlds.data import PlaygroundData
from retouch_worlds.playground.rendering import render
from retouch_worlds.playground.scenes import Edit, Scene, apply
from retouch_worlds.playground.texts import with_unfinished_target as unfinished

TASKS = PlaygroundData(seed=0, count=120, complexity=[1, 2, 3]).tasks(in_turn=True)


def left_out(task):
    """The indices of the edits without which the scene looks like the target."""
    scene, edits = Scene.from_json(task.meta["scene"]), [Edit.from_json(edit) for edit in task.meta["edits"]]
    places = []
    for place in range(len(edits)):
        with suppress(ValueError):  # without it the scene would be empty
            if task.target == render(apply(scene, edits[:place] + edits[place + 1 :])):
                places.append(place)
    return places


def test_one_of_several_edits_is_missing_from_the_target_and_nothing_else_changes():
    lacking = 0
    for plain, task in zip(TASKS, MappedTasks(TASKS, partial(unfinished, share=1.0)), strict=True):
        assert (task.id, task.instruction, task.meta, task.tags) == (plain.id, plain.instruction, plain.meta, plain.tags)
        if plain.tags["complexity"] == "1" or task.target == plain.target:
            continue
        assert len(left_out(task)) == 1
        lacking += 1
    assert lacking >= 0.9 * sum(task.tags["complexity"] != "1" for task in TASKS)
    places = {left_out(task)[0] for task in MappedTasks(TASKS, partial(unfinished, share=1.0)) if left_out(task)}
    assert places == {0, 1, 2}


def test_the_share_of_unfinished_targets_is_as_requested_and_deterministic():
    assert all(
        task.target == plain.target for plain, task in zip(TASKS, MappedTasks(TASKS, partial(unfinished, share=0.0)), strict=True)
    )
    changed = MappedTasks(PlaygroundData(seed=1, count=300, complexity=[2]).tasks(in_turn=True), partial(unfinished, share=0.5))
    assert 0.4 < sum(bool(left_out(task)) for task in changed) / 300 < 0.6
    again = MappedTasks(PlaygroundData(seed=1, count=300, complexity=[2]).tasks(in_turn=True), partial(unfinished, share=0.5))
    assert [task.target for task in again] == [task.target for task in changed]
