"""Edits: their effect on a scene, which combinations raise, and the JSON round trip."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.random import generator
from retouch_worlds.playground.scenes import (
    KINDS,
    Edit,
    Scene,
    Thing,
    apply,
    edits_of_kinds,
    random_kinds,
    random_scene,
    things_needed,
)
from scene_reader import random_edits

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
def test_edits_change_exactly_the_cells_they_touch(case: tuple[Scene, tuple[Edit, ...]]) -> None:
    scene, edits = case
    target = apply(scene, edits)
    touched = [cell for edit in edits for cell in edit.touches]
    assert len(set(touched)) == len(touched) < 9
    assert {cell for cell in range(9) if scene.cells[cell] != target.cells[cell]} == set(touched)
    assert target.objects


@given(drawn)
def test_created_things_are_new_and_edited_things_exist(case: tuple[Scene, tuple[Edit, ...]]) -> None:
    scene, edits = case
    created = [edit.creates for edit in edits if edit.creates is not None]
    assert len(set(created)) == len(created)
    assert not set(created) & set(scene.objects.values())
    assert all(scene.cells[edit.cell] == edit.thing for edit in edits if edit.kind != "add")


@given(drawn)
def test_edits_round_trip_through_json(case: tuple[Scene, tuple[Edit, ...]]) -> None:
    for edit in case[1]:
        assert Edit.from_json(json.loads(json.dumps(edit.to_json()))) == edit


@pytest.mark.parametrize(
    "edits",
    [
        [Edit("remove", 0, BLUE, 0, None)],
        [Edit("remove", 1, RED, 1, None)],
        [Edit("add", 0, BLUE, 0, BLUE)],
        [Edit("move", 0, RED, 4, RED)],
        [Edit("add", 1, GREEN, 1, GREEN)],
        [Edit("recolour", 0, RED, 0, BLUE), Edit("add", 1, BLUE, 1, BLUE)],
        [Edit("move", 0, RED, 1, RED), Edit("add", 1, BLUE, 1, BLUE)],
        [Edit("move", 0, RED, 1, RED), Edit("add", 0, BLUE, 0, BLUE)],
        [Edit("remove", 0, RED, 0, None), Edit("add", 1, RED, 1, RED)],
        [Edit("remove", 0, RED, 0, None), Edit("remove", 4, GREEN, 4, None)],
    ],
)
def test_edits_that_conflict_with_the_scene_or_each_other_raise(edits: list[Edit]) -> None:
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


def test_bad_complexities_are_refused() -> None:
    for complexity in (0, 5):
        with pytest.raises(ValueError, match="complexity"):
            random_edits(SCENE, complexity, generator(0))


def test_a_scene_with_too_few_things_for_the_complexity_raises() -> None:
    with pytest.raises(ValueError, match="more things"):
        random_edits(Scene(0, (RED, *[None] * 8)), 4, generator(0))
