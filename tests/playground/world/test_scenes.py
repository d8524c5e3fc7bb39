"""Scenes: what they can contain, how they are rendered, and the JSON round trip."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.random import generator
from retouch_worlds.measuring import DEAD, SCALE
from retouch_worlds.playground.rendering import TEMPLATES, render
from retouch_worlds.playground.scenes import BACKGROUNDS, CELL, CODES, SIZE, THINGS, Scene, Thing, random_scene

seeds = st.integers(0, 10**6)


@given(seeds)
def test_random_scenes_contain_two_to_four_different_things(seed: int) -> None:
    scene = random_scene(generator(seed))
    assert 2 <= len(scene.objects) <= 4
    assert len(set(scene.objects.values())) == len(scene.objects)
    assert sorted([*scene.objects, *scene.empty]) == list(range(9))


def test_random_scenes_cover_all_backgrounds_cells_things_and_counts() -> None:
    scenes = [random_scene(generator("reach", i)) for i in range(1000)]
    assert {scene.background for scene in scenes} == set(range(4))
    assert {(cell, thing) for scene in scenes for cell, thing in scene.objects.items()} == set(itertools.product(range(9), THINGS))
    assert {len(scene.objects) for scene in scenes} == {2, 3, 4}


@given(seeds)
def test_scenes_round_trip_through_json(seed: int) -> None:
    scene = random_scene(generator(seed))
    assert Scene.from_json(json.loads(json.dumps(scene.to_json()))) == scene


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"background": 0},
        {"background": 4, "objects": []},
        {"background": 0, "objects": [[9, "red", "circle"]]},
        {"background": 0, "objects": [[0, "red"]]},
        {"background": 0, "objects": [[0, "mauve", "circle"]]},
        {"background": 0, "objects": [[0, "red", "circle"], [0, "blue", "circle"]]},
        {"background": 0, "objects": [[0, "red", "circle"], [1, "red", "circle"]]},
    ],
)
def test_invalid_scenes_raise(value: object) -> None:
    with pytest.raises(ValueError, match=r"scene|things|thing occurs"):
        Scene.from_json(value)  # type: ignore[arg-type]


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
