"""The reward of the text-to-image playground: its columns compared with a slow reference implementation, and their properties."""

import math

import numpy as np
import pytest
from PIL import Image

from retouch.protocols import Reward
from retouch.types import Sample, Task
from retouch_worlds.data import TextToImageData
from retouch_worlds.playground.rendering import TEMPLATES, render
from retouch_worlds.playground.scenes import BACKGROUNDS, CELL, CODES, SIZE, Scene, Thing
from retouch_worlds.rewards import SceneReward

JUDGE = SceneReward()
TASKS = TextToImageData(seed=5, count=400, complexity=[1, 2, 3, 4]).tasks(in_turn=True)
RED, BLUE = Thing("red", "circle"), Thing("blue", "square")


def judge(task, image):
    return {name: column.item() for name, column in JUDGE([Sample(task, image)]).items()}


def scene_of(task):
    return Scene.from_json(task.meta["scene"])


def scene_with(*things, background=1):
    return Scene(background, tuple(dict(things).get(cell) for cell in range(9)))


def task_with(*things):
    """A task that asks for these things in these cells."""
    return Task(id="t", instruction="paint", meta={"scene": scene_with(*things).to_json()})


def reference_scores(task, image):
    """A reference implementation of the columns, one cell at a time."""
    values = np.asarray(image).astype(np.float64)
    rows = [(slice(r * CELL, (r + 1) * CELL), slice(c * CELL, (c + 1) * CELL)) for r in range(3) for c in range(3)]
    cells = [values[window] for window in rows]

    def rms(a, b):
        return float(np.sqrt(np.mean((a / 255 - b / 255) ** 2)))

    def keep(distance):
        return 1 - min(max((distance - 0.03) / 0.09, 0), 1)

    def distances(cell, background):
        return [rms(cells[cell], TEMPLATES[background, code].astype(np.float64)) for code in range(19)]

    shown = min(range(len(BACKGROUNDS)), key=lambda ground: sum(min(distances(cell, ground)) ** 2 for cell in range(9)))
    nearest = [int(np.argmin(distances(cell, shown))) for cell in range(9)]
    wanted = [CODES[thing] for thing in scene_of(task).cells]
    things = [cell for cell in range(9) if wanted[cell]]
    extra = sum(nearest[cell] > 0 and not wanted[cell] for cell in range(9))
    ground = float(shown == scene_of(task).background)
    credit = sum(keep(distances(cell, shown)[wanted[cell]]) for cell in things)
    clear = [keep(min(distances(cell, shown))) for cell in range(9)]
    any_thing = any(nearest[cell] and clear[cell] > 0 for cell in range(9))
    alignment = 10 * (3 * credit + ground) / (3 * (len(things) + extra) + 1)
    quality = 10 * float(np.mean(clear)) * any_thing
    return {
        "alignment": alignment,
        "quality": quality,
        "overall": math.sqrt(alignment * quality),
        "exact": float(nearest == wanted and ground == 1 and quality >= 7),
        "shown": float(np.mean([nearest[cell] == wanted[cell] for cell in things])),
        "ground": ground,
        "extra": float(extra),
    }


def pictures():
    """Right, wrong, noisy and meaningless images for tasks."""
    drawn = np.random.default_rng(0)
    cases = []
    for number, task in enumerate(TASKS[:24]):
        base = np.asarray(render(scene_of(TASKS[(number + 5 * (number % 2)) % 24]))).astype(np.float64)
        noisy = base + drawn.normal(0, (0, 4, 12, 40)[number // 2 % 4], base.shape)
        cases.append((task, Image.fromarray(np.clip(np.rint(noisy), 0, 255).astype(np.uint8))))
    cases.append((TASKS[0], Image.fromarray(drawn.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))))
    return cases


def test_columns_match_the_reference_implementation():
    for task, image in pictures():
        found, wanted = judge(task, image), reference_scores(task, image)
        assert found.keys() == wanted.keys() == JUDGE.columns.keys()
        assert found == pytest.approx(wanted, abs=1e-5)


def test_scores_of_a_sample_do_not_depend_on_the_batch():
    assert isinstance(JUDGE, Reward)
    cases = pictures()
    together = JUDGE([Sample(task, image) for task, image in cases])
    for row, (task, image) in enumerate(cases):
        assert judge(task, image) == {name: column[row].item() for name, column in together.items()}
    assert all(column.shape == (0,) for column in JUDGE([]).values())


@pytest.mark.parametrize(
    ("painted", "alignment", "exact"),
    [
        (scene_with((0, RED), (4, BLUE)), 10, 1),
        (scene_with((0, RED)), 10 * 4 / 7, 0),
        (scene_with((0, RED), (4, BLUE), background=3), 10 * 6 / 7, 0),
        (scene_with((0, BLUE), (4, RED)), 10 * 1 / 7, 0),
        (scene_with((0, RED), (5, BLUE)), 10 * 4 / 10, 0),
        (scene_with((0, RED), (4, BLUE), (8, Thing("pink", "circle"))), 10 * 7 / 10, 0),
    ],
    ids=["right", "one missing", "another ground", "swapped", "elsewhere", "one too many"],
)
def test_missing_wrong_and_extra_things_lower_alignment_by_the_formula(painted, alignment, exact):
    found = judge(task_with((0, RED), (4, BLUE)), render(painted))
    assert found["alignment"] == pytest.approx(alignment, abs=1e-5)
    assert found["quality"] == 10
    assert found["exact"] == exact


def test_no_image_a_wrong_size_or_an_empty_canvas_scores_0_and_a_task_without_a_scene_raises():
    for image in (None, Image.new("RGB", (48, 48))):
        found = judge(TASKS[0], image)
        assert math.isnan(found.pop("extra"))
        assert set(found.values()) == {0.0}
    found = judge(task_with((0, RED)), render(scene_with()))
    assert (found["quality"], found["overall"]) == (0, 0)
    for task, says in ((Task(id="x", instruction="y"), "no scene"), (task_with(), "empty scene")):
        with pytest.raises(ValueError, match=says):
            judge(task, None)
