"""A thought for each of the playground's tasks."""

from retouch.data.tasks import MappedTasks
from retouch_worlds.data import PlaygroundData
from retouch_worlds.playground.scenes import Edit
from retouch_worlds.playground.texts import with_thought


def test_a_thought_mentions_every_edit_of_its_task():
    tasks = PlaygroundData(seed=0, count=12, complexity=[1, 2, 3], filler=0.5).tasks(in_turn=True)
    told = MappedTasks(tasks, with_thought)
    assert len(told) == 12
    for plain, task in zip(tasks, told[:], strict=True):
        thought = task.meta["thought"]
        edits = [Edit.from_json(edit) for edit in plain.meta["edits"]]
        assert thought.count(";") == len(edits) - 1
        assert all(" ".join(edit.thing) in thought for edit in edits)
        assert (task.id, task.instruction, task.meta["scene"]) == (plain.id, plain.instruction, plain.meta["scene"])
    assert told[3].meta["thought"] == told[3:4][0].meta["thought"]
