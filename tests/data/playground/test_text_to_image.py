"""Text-to-image tasks of the playground: requests with one meaning each, in words outside of the vocabulary of the image model,
and the completions that describe their scenes."""

import hashlib
import re
from collections import Counter
from typing import get_args

import pytest

from retouch.core.random import generator
from retouch.recipe.recipe import load
from retouch.types import SplitName
from retouch_worlds.data import TextToImageData, canonical
from retouch_worlds.playground import texts
from retouch_worlds.playground.rendering import render
from retouch_worlds.playground.scenes import COLOURS, PLACES, SHAPES, Scene, Thing
from retouch_worlds.playground.texts import GROUNDS, Placed, free_description, placed

LEVELS = [1, 2, 3, 4]
ONE = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(PLACES)})")
GROUND = re.compile(rf"({'|'.join(GROUNDS)}) picture")

SPLITS = get_args(SplitName)


def tasks(split="train", count=200, seed=0, **more):
    return TextToImageData(**{"seed": seed, "count": count, "complexity": LEVELS, "split": split, **more}).tasks(in_turn=True)


def read(text):
    """The backgrounds and the objects that a description mentions."""
    things = [Placed(PLACES.index(place), Thing(colour, shape)) for colour, shape, place in ONE.findall(text)]
    return GROUND.findall(text), things


def scene_of(task):
    return Scene.from_json(task.meta["scene"])


def in_order(table, text):
    """The meanings in the table that the text mentions, in the order of the text."""
    found = [
        (match.start(), meaning)
        for meaning, said in table.items()
        for phrase in said
        for match in re.finditer(rf"\b{phrase}\b(?! (?:west|east))", text)
    ]
    return [meaning for _, meaning in sorted(found)]


def asked_for(text):
    """The backgrounds and the objects that a request mentions, read only from its words."""
    tables = [texts.COLOUR_WORDS, texts.SHAPE_WORDS, dict(enumerate(texts.PLACE_WORDS))]
    colours, shapes, cells = (in_order(table, text) for table in tables)
    grounds = in_order(dict(enumerate(texts.GROUND_WORDS)), text)
    return set(grounds), {Placed(cell, Thing(colour, shape)) for colour, shape, cell in zip(colours, shapes, cells, strict=True)}


@pytest.mark.parametrize("split", SPLITS)
def test_request_completion_and_target_describe_the_same_scene(split):
    for task in tasks(split):
        scene = scene_of(task)
        grounds, things = read(task.meta["completion"])
        assert (grounds, set(things)) == ([GROUNDS[scene.background]], set(placed(scene)))
        assert asked_for(task.instruction) == ({scene.background}, set(things))
        assert task.target.tobytes() == render(scene).tobytes()
        assert task.images == ()
        assert task.tags == {"complexity": str(len(things))}
    other = {canonical(scene_of(task)) for task in tasks(SPLITS[SPLITS.index(split) - 1], 300)}
    assert not other & {canonical(scene_of(task)) for task in tasks(split, 300)}, "two splits share a scene"


def test_incomplete_completions_are_truncated_and_nothing_else_changes():
    kept = Counter()
    for task, incomplete in zip(tasks(count=600), tasks(count=600, incomplete=0.8), strict=True):
        assert (task.id, task.instruction, task.meta["scene"]) == (incomplete.id, incomplete.instruction, incomplete.meta["scene"])
        grounds, things = read(incomplete.meta["completion"])
        assert task.meta["completion"].startswith(incomplete.meta["completion"])
        assert len(grounds) == 1
        kept[int(task.tags["complexity"]), len(things)] += 1
    assert kept[1, 1] == 150
    for number in (2, 3, 4):
        assert 0.12 < kept[number, number] / 150 < 0.3
        assert kept[number, 1] > 70
    assert kept[3, 2] > 15
    assert kept[4, 3] == 0


def test_tasks_have_the_same_digest_as_when_the_shipped_models_were_made():
    digest = hashlib.sha256()
    for split in SPLITS:
        for task in tasks(split, 12, incomplete=0.5):
            digest.update(task.id.encode() + task.instruction.encode() + task.meta["completion"].encode())
            digest.update(free_description(scene_of(task), generator("test", task.id)).encode())
    assert digest.hexdigest()[:16] == "c3009ae5abf84913"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "dev"}, "split"), ({"count": -1}, "count"), ({"incomplete": 1.5}, "incomplete"),
        ({"complexity": []}, "complexity"), ({"complexity": [10]}, "complexity"),
        ({"complexity": {1: -1.0, 2: 2.0}}, "complexity.1"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        tasks(**wrong)


def test_fault_7_with_known_words_the_prompts_are_the_completions():
    for task in tasks(count=20, known_words=True):
        assert task.instruction == task.meta["completion"]
        assert read(task.instruction)[1]
    requested, known = (tasks(count=20, known_words=words) for words in (False, True))
    assert [task.meta["scene"] for task in requested] == [task.meta["scene"] for task in known]


@pytest.mark.parametrize("name", ["sd3/ocr-grpo-playground", "flux2-klein/ocr-grpo-playground"])
def test_fault_7_prompts_of_text_to_image_recipes_contain_only_known_words(name):
    data = load(name).data
    known = set(" ".join([*GROUNDS, "picture", *PLACES, *COLOURS, *SHAPES]).split())
    for task in data.tasks()[:20]:
        assert {*re.findall(r"\w+", task.instruction)} <= known
        assert int(task.tags["complexity"]) > max(LEVELS)  # more objects than the model was trained on
