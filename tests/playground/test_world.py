"""The playground's world: scenes, edits, instructions, thoughts and unfinished targets."""

import itertools
import json
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.random import generator
from retouch.data.tasks import MappedTasks
from retouch_worlds.data import PlaygroundData
from retouch_worlds.measuring import DEAD, SCALE
from retouch_worlds.playground.rendering import TEMPLATES, render
from retouch_worlds.playground.scenes import (
    BACKGROUNDS,
    CELL,
    CODES,
    KINDS,
    SIZE,
    Edit,
    Scene,
    Thing,
    apply,
    edits_of_kinds,
    random_kinds,
    random_scene,
    things_needed,
)
from retouch_worlds.playground.texts import PHRASES, corpus, instruction, phrase, untouched, vocabulary, with_thought
from retouch_worlds.playground.texts import with_unfinished_target as unfinished
from scene_reader import all_single_edits, meaning, random_edits, read

# Scenes

seeds = st.integers(0, 10**6)


@given(seeds)
def test_random_scenes_contain_two_to_four_different_things_and_round_trip_through_json(seed: int) -> None:
    scene = random_scene(generator(seed))
    assert 2 <= len(scene.objects) <= 4
    assert len(set(scene.objects.values())) == len(scene.objects)
    assert sorted([*scene.objects, *scene.empty]) == list(range(9))
    assert Scene.from_json(json.loads(json.dumps(scene.to_json()))) == scene


def test_invalid_scenes_raise() -> None:
    objects: tuple[Any, ...] = (
        [[9, "red", "circle"]], [[0, "red"]], [[0, "mauve", "circle"]], [[0, "red", "circle"], [0, "blue", "circle"]],
        [[0, "red", "circle"], [1, "red", "circle"]],
    )  # fmt: skip
    invalid = [None, {"background": 0}, {"background": 4, "objects": []}, *({"background": 0, "objects": each} for each in objects)]
    for value in invalid:
        with pytest.raises(ValueError, match=r"scene|things|thing occurs"):
            Scene.from_json(value)


@given(seeds)
def test_a_rendered_image_consists_of_its_cell_templates(seed: int) -> None:
    scene = random_scene(generator(seed))
    picture = render(scene)
    assert picture.mode == "RGB"
    assert picture.size == (SIZE, SIZE)
    for cell, thing in enumerate(scene.cells):
        row, column = divmod(cell, 3)
        part = np.asarray(picture)[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        assert np.array_equal(part, TEMPLATES[scene.background, CODES[thing]])


def test_things_have_their_colour_in_the_middle_and_the_background_in_the_corner() -> None:
    for background, grey in enumerate(BACKGROUNDS):
        scene = Scene(background, (Thing("red", "circle"), Thing("blue", "triangle"), *[None] * 7))
        picture = render(scene)
        assert picture.getpixel((4, 4)) == (225, 25, 25)
        assert picture.getpixel((12, 5)) == (35, 55, 235)
        assert picture.getpixel((0, 0)) == picture.getpixel((23, 23)) == (grey, grey, grey)


def test_cells_of_a_background_differ_by_more_than_the_tolerance_of_the_judge() -> None:
    values = TEMPLATES.reshape(len(BACKGROUNDS), len(CODES), -1) / 255
    for templates in values:
        for a, b in itertools.combinations(templates, 2):
            assert np.sqrt(np.mean((a - b) ** 2)) > DEAD + SCALE


# Edits

RED, BLUE, GREEN = Thing("red", "circle"), Thing("blue", "circle"), Thing("green", "triangle")
SCENE = Scene(1, (RED, None, None, None, GREEN, None, None, None, None))


def draw(seed: int, complexity: int) -> tuple[Scene, tuple[Edit, ...]]:
    """A random scene and random edits that fit it."""
    random = generator("edits", seed)
    scene = random_scene(random, least=min(complexity + 1, 4))
    return scene, random_edits(scene, complexity, random)


drawn = st.builds(draw, st.integers(0, 10**6), st.integers(1, 4))


@pytest.mark.parametrize(
    ("edit", "after"),
    [
        (Edit("recolour", 0, RED, 0, BLUE), {0: BLUE, 4: GREEN}),
        (Edit("reshape", 0, RED, 0, Thing("red", "square")), {0: Thing("red", "square"), 4: GREEN}),
        (Edit("remove", 0, RED, 0, None), {4: GREEN}),
        (Edit("add", 8, BLUE, 8, BLUE), {0: RED, 4: GREEN, 8: BLUE}),
        (Edit("move", 0, RED, 7, RED), {4: GREEN, 7: RED}),
    ],
)
def test_each_kind_of_edit_changes_the_scene_as_expected(edit: Edit, after: dict[int, Thing]) -> None:
    target = apply(SCENE, [edit])
    assert target.objects == after
    assert target.background == SCENE.background


@given(drawn)
def test_edits_change_exactly_the_cells_they_touch_create_new_things_and_round_trip_through_json(
    case: tuple[Scene, tuple[Edit, ...]],
) -> None:
    scene, edits = case
    target = apply(scene, edits)
    touched = [cell for edit in edits for cell in edit.touches]
    assert len(set(touched)) == len(touched) < 9
    assert {cell for cell in range(9) if scene.cells[cell] != target.cells[cell]} == set(touched)
    assert target.objects
    created = [edit.creates for edit in edits if edit.creates is not None]
    assert len(set(created)) == len(created)
    assert not set(created) & set(scene.objects.values())
    assert all(scene.cells[edit.cell] == edit.thing for edit in edits if edit.kind != "add")
    assert [Edit.from_json(json.loads(json.dumps(edit.to_json()))) for edit in edits] == [*edits]


def test_edits_that_conflict_with_the_scene_or_each_other_raise() -> None:
    moved, emptied = Edit("move", 0, RED, 1, RED), Edit("remove", 0, RED, 0, None)
    for edits in (
        [Edit("remove", 0, BLUE, 0, None)], [Edit("remove", 1, RED, 1, None)], [Edit("add", 0, BLUE, 0, BLUE)],
        [Edit("move", 0, RED, 4, RED)], [Edit("add", 1, GREEN, 1, GREEN)],
        [Edit("recolour", 0, RED, 0, BLUE), Edit("add", 1, BLUE, 1, BLUE)], [moved, Edit("add", 1, BLUE, 1, BLUE)],
        [moved, Edit("add", 0, BLUE, 0, BLUE)], [emptied, Edit("add", 1, RED, 1, RED)],
        [emptied, Edit("remove", 4, GREEN, 4, None)],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"fit|touches|second|empty"):
            apply(SCENE, edits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recolour", 0, RED, 0, RED), "not an edit of the kind 'recolour'"),
        (("recolour", 0, RED, 0, GREEN), "not an edit of the kind 'recolour'"),
        (("reshape", 0, RED, 0, BLUE), "not an edit of the kind 'reshape'"),
        (("remove", 0, RED, 0, BLUE), "not an edit of the kind 'remove'"),
        (("add", 0, RED, 1, RED), "not an edit of the kind 'add'"),
        (("move", 0, RED, 0, RED), "not an edit of the kind 'move'"),
        (("explode", 0, RED, 0, None), "not an edit of the kind 'explode'"),
        (("move", 0, RED, 9, RED), "unknown thing or cell"),
        (("remove", 0, Thing("mauve", "circle"), 0, None), "unknown thing or cell"),
    ],
)
def test_invalid_edits_raise(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Edit(*arguments)  # type: ignore[arg-type]


def test_every_sampled_combination_of_kinds_fits_some_scene() -> None:
    random = generator("kinds")
    seen = {tuple(sorted(random_kinds(complexity, random))) for complexity in range(1, 5) for _ in range(500)}
    assert {kind for kinds in seen for kind in kinds} == set(KINDS)
    for kinds in seen:
        found = any(edits_of_kinds(random_scene(random, least=things_needed(kinds)), kinds, random) for _ in range(20))  # type: ignore[arg-type]
        assert found, kinds


def test_a_complexity_without_edits_or_enough_things_raises() -> None:
    for complexity in (0, 5):
        with pytest.raises(ValueError, match="complexity"):
            random_edits(SCENE, complexity, generator(0))
    with pytest.raises(ValueError, match="more things"):
        random_edits(Scene(0, (RED, *[None] * 8)), 4, generator(0))


# Instructions


def test_no_two_single_edits_share_a_text() -> None:
    texts = [phrase(edit, pattern) for edit in all_single_edits() for pattern in PHRASES[edit.kind]]
    assert len(all_single_edits()) == 18 * (5 + 2 + 1 + 9 + 9)
    assert len(set(texts)) == len(texts)


@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_an_instruction_is_parsed_back_to_its_edits(seed: int, complexity: int, filler: bool) -> None:
    random = generator("read", seed)
    scene = random_scene(random, least=4)
    edits = random_edits(scene, complexity, random)
    text = instruction(edits, untouched(scene, edits), random, filler=filler)
    assert read(text) == {meaning(edit) for edit in edits}


def test_the_vocabulary_is_small_and_equals_the_words_of_the_corpus() -> None:
    words = {word for text in corpus(generator("corpus"), 4000) for word in text.replace(",", " , ").replace(";", " ; ").split()}
    assert words == set(vocabulary())
    assert len(words) < 200
    assert all(word == word.lower() for word in words)


# A thought for each of the playground's tasks


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


# Demonstrations of several edits whose target lacks one of them

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
