"""A thought for each of the playground's tasks."""

from retouch.playground.edits import Edit
from retouch.playground.tasks import PlaygroundTasks
from retouch.playground.thoughts import ThinkingTasks


def test_a_thought_says_the_edits_in_plain_words():
    tasks = PlaygroundTasks(seed=0, count=12, complexity=[1, 2, 3], split="train", filler=0.5)
    thinking = ThinkingTasks(tasks)
    assert len(thinking) == 12
    for plain, task in zip(tasks, thinking[:], strict=True):
        thought = task.meta["thought"]
        edits = [Edit.from_json(edit) for edit in plain.meta["edits"]]
        assert thought.count(";") == len(edits) - 1
        assert all(" ".join(edit.thing) in thought for edit in edits)
        assert (task.id, task.instruction, task.meta["scene"]) == (plain.id, plain.instruction, plain.meta["scene"])
    assert thinking[3].meta["thought"] == thinking[3:4][0].meta["thought"]
