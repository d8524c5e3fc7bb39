"""Editing tasks of the playground: deterministic, with splits that share nothing; indirect instructions and their completions."""

import hashlib
import itertools
from collections import Counter
from functools import partial
from typing import get_args

import numpy as np
import pytest

from retouch.data.tasks import MappedTasks
from retouch.types import SplitName
from retouch_worlds.data import PlaygroundData, canonical, indirect
from retouch_worlds.playground.rendering import render
from retouch_worlds.playground.scenes import Edit, Scene, apply
from retouch_worlds.playground.texts import content

LEVELS = [1, 2, 3, 4]

SPLITS = get_args(SplitName)


def tasks(split, count=200, seed=0, **more):
    """Tasks of all complexities."""
    return PlaygroundData(seed=seed, count=count, split=split, **{"complexity": LEVELS, "filler": 0.3, **more}).tasks(in_turn=True)


def parts(task):
    """The scene and the edits."""
    edits = task.meta["edits"]
    assert isinstance(edits, list)
    return Scene.from_json(task.meta["scene"]), [Edit.from_json(edit) for edit in edits]


def visible_parts(task):
    """The id of a task, and all that a policy sees of it."""
    return task.id, task.instruction, task.images[0].tobytes()


@pytest.mark.parametrize("split", SPLITS)
def test_source_target_and_tags_agree_with_the_scene_and_the_edits(split):
    for task in tasks(split):
        scene, edits = parts(task)
        assert task.target is not None
        assert np.array_equal(np.asarray(task.images[0]), np.asarray(render(scene)))
        assert np.array_equal(np.asarray(task.target), np.asarray(render(apply(scene, edits))))
        assert task.tags == {"complexity": str(len(edits)), "kinds": "+".join(sorted(edit.kind for edit in edits))}


def test_splits_share_no_scene_and_no_content():
    drawn = {split: [parts(task) for seed in range(2) for task in tasks(split, 600, seed)] for split in SPLITS}
    scenes = {split: {canonical(scene) for scene, _ in drawn[split]} for split in SPLITS}
    contents = {split: {content(edits) for _, edits in drawn[split]} for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not scenes[one] & scenes[other]
        assert not contents[one] & contents[other]


def test_a_task_is_determined_by_seed_and_index():
    long, short = tasks("train", 1000), tasks("train", 10)
    assert [visible_parts(task) for task in short] == [visible_parts(long[i]) for i in range(10)]
    assert visible_parts(long[7]) == visible_parts(long[7])
    assert [visible_parts(task) for task in long[3:6]] == [visible_parts(long[i]) for i in (3, 4, 5)]
    assert visible_parts(long[-1]) == visible_parts(long[999])
    assert not {visible_parts(task)[2] for task in tasks("train", 10, seed=1)} & {visible_parts(task)[2] for task in short}


def test_tasks_have_the_same_digest_as_when_the_shipped_models_were_made():
    digest = hashlib.sha256()
    for split in SPLITS:
        for task in tasks(split, 12):
            digest.update(task.id.encode() + task.instruction.encode() + task.images[0].tobytes() + task.target.tobytes())
    assert digest.hexdigest()[:16] == "f71500714fac43ce"


def test_indirect_and_impossible_requests_have_the_same_digest_as_when_their_meaning_was_checked():
    """Then each meant one edit with its image and several without it, and no impossible edit had an object of its scene."""
    digest = hashlib.sha256()
    for task in MappedTasks(TASKS, partial(indirect, incomplete=0.6)):
        digest.update(task.instruction.encode() + task.meta["completion"].encode())
    for task in tasks("train", 60, complexity=[1, 4], impossible=0.5):
        digest.update(task.instruction.encode())
    assert digest.hexdigest()[:16] == "66bda9473afdc781"


def test_a_list_of_complexities_is_cycled_and_weights_set_their_frequencies():
    assert [task.tags["complexity"] for task in tasks("train", 8)] == ["1", "2", "3", "4"] * 2
    counts = Counter(task.tags["complexity"] for task in tasks("train", 1200, complexity={1: 3, 2: 1, 4: 0}))
    assert set(counts) == {"1", "2"}
    assert counts["1"] / 1200 == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "dev"}, "split"), ({"count": -1}, "count"), ({"filler": 1.5}, "filler"), ({"impossible": -0.1}, "impossible"),
        ({"complexity": []}, "complexity"), ({"complexity": [5]}, "complexity"),
        ({"complexity": {1: -1.0, 2: 2.0}}, "complexity.1"), ({"complexity": {1: 0.0}}, "every weight is 0"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        PlaygroundData(**{"seed": 0, "count": 1, "complexity": [1], "split": "train", "filler": 0.0, **wrong}).tasks(in_turn=True)


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
