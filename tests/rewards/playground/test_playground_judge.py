"""The reward of the editing playground: its columns compared with a slow reference implementation, and their properties."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from retouch.protocols import Reward
from retouch.types import Sample, Task
from retouch_worlds.data import PlaygroundData
from retouch_worlds.playground.rendering import TEMPLATES, render
from retouch_worlds.playground.scenes import BACKGROUNDS, CELL, CODES, KINDS, SIZE, Edit, Scene, apply
from retouch_worlds.rewards import PlaygroundReward

JUDGE = PlaygroundReward()
TASKS = PlaygroundData(seed=5, count=10**6, complexity=[1, 2, 3, 4], filler=0.2).tasks(in_turn=True)
tasks = st.integers(0, 10**6 - 1).map(TASKS.__getitem__)
MAIN = ("IF", "IP", "PQ", "overall", "exact")


def judge(task, image):
    return {name: column.item() for name, column in JUDGE([Sample(task, image)]).items()}


def parts(task):
    """The scene and the edits."""
    return Scene.from_json(task.meta["scene"]), [Edit.from_json(edit) for edit in task.meta["edits"]]


def array(image):
    return np.asarray(image).astype(np.float64)


def picture(values):
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def window(cell):
    """Where a cell lies."""
    row, column = divmod(cell, 3)
    return slice(row * CELL, (row + 1) * CELL), slice(column * CELL, (column + 1) * CELL)


def noise(seed):
    return np.random.default_rng(seed).uniform(0, 255, (SIZE, SIZE, 3))


def reference_scores(task, image):
    """A reference implementation of the columns, one cell at a time."""
    scene, edits = parts(task)
    target = apply(scene, edits)

    def rms(a, b):
        return float(np.sqrt(np.mean((a / 255 - b / 255) ** 2)))

    def keep(distance):
        return 1 - min(max((distance - 0.03) / 0.09, 0), 1)

    def template(background, code):
        return TEMPLATES[background, code].astype(np.float64)

    shown = [array(image)[window(cell)] for cell in range(9)]
    old = [template(scene.background, CODES[thing]) for thing in scene.cells]
    new = [template(scene.background, CODES[thing]) for thing in target.cells]
    credits = []
    for edit in edits:
        cells = [1 - rms(shown[c], new[c]) / rms(old[c], new[c]) for c in edit.touches]
        credits.append(np.mean([min(max((cell - 0.1) / 0.8, 0), 1) for cell in cells]))
    touched = {cell for edit in edits for cell in edit.touches}
    weights = {cell: 3.0 if scene.cells[cell] else 1.0 for cell in range(9) if cell not in touched}
    preserved = sum(weight * keep(rms(shown[c], old[c])) for c, weight in weights.items()) / sum(weights.values())
    best = None
    for background in range(4):
        found = [min((rms(cell, template(background, code)), code) for code in range(len(CODES))) for cell in shown]
        cost = sum(distance**2 for distance, _ in found)
        if best is None or cost < best[0]:
            best = (cost, background, found)
    assert best is not None
    _, background, found = best
    recognised = any(code > 0 and keep(distance) > 0 for distance, code in found)
    quality = 10 * float(np.mean([keep(distance) for distance, _ in found])) * recognised
    nearest = [code for _, code in found]
    right = [nearest[cell] == CODES[target.cells[cell]] for cell in range(9)]
    result = {"IF": 10 * float(np.mean(credits)), "IP": 10 * preserved, "PQ": quality}
    result["overall"] = math.sqrt(min(result["IF"], result["IP"]) * quality)
    result["exact"] = float(all(right) and background == scene.background and quality >= 7)
    for kind in KINDS:
        done = [all(right[c] for c in edit.touches) for edit in edits if edit.kind == kind]
        result[f"success/{kind}"] = float(np.mean(done)) if done else math.nan
    return result


@settings(deadline=None, max_examples=60)
@given(tasks, st.integers(0, 1000), st.floats(0, 0.5), st.floats(0, 1))
def test_columns_match_the_reference_implementation(task, seed, strength, progress):
    other = TASKS[seed]
    mixed = array(task.images[0]) * (1 - progress) + array(task.target) * progress
    mixed[window(seed % 9)] = array(other.target)[window(seed % 9)]
    image = picture(mixed * (1 - strength) + noise(seed) * strength)
    expected, got = reference_scores(task, image), judge(task, image)
    assert set(got) == set(expected) == set(JUDGE.columns)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-5, nan_ok=True), name


@given(tasks, st.integers(1, 3), st.sampled_from(BACKGROUNDS))
def test_the_target_the_right_things_elsewhere_and_an_empty_canvas_have_their_scores(task, shift, grey):
    scores, kinds = judge(task, task.target), task.tags["kinds"].split("+")
    assert [scores[name] for name in MAIN] == pytest.approx([10, 10, 10, 10, 1])
    for kind in KINDS:
        assert scores[f"success/{kind}"] == pytest.approx(1.0 if kind in kinds else math.nan, nan_ok=True)
    scene, edits = parts(task)
    scores = judge(task, render(Scene((scene.background + shift) % 4, apply(scene, edits).cells)))
    assert scores["exact"] == 0
    assert scores["PQ"] == 10
    assert scores["IP"] < 10
    assert all(scores[f"success/{kind}"] == 1 for kind in kinds)
    scores = judge(task, Image.new("RGB", (SIZE, SIZE), (grey,) * 3))
    assert scores["PQ"] == scores["overall"] == scores["exact"] == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_scores_do_not_depend_on_the_other_rows_or_their_order(indices, random):
    makers: list[Callable[[Task], Image.Image | None]] = [
        lambda task: task.target,
        lambda task: task.images[0],
        lambda task: picture(array(task.target) * 0.8 + noise(1) * 0.2),
        lambda task: None,
    ]
    samples = [Sample(task, makers[i % 4](task)) for i, task in enumerate(TASKS[k] for k in indices)]
    order = list(range(len(samples)))
    random.shuffle(order)
    together, shuffled = JUDGE(samples), JUDGE([samples[i] for i in order])
    alone = [JUDGE([sample]) for sample in samples]
    for name, column in together.items():
        assert torch.equal(column[order].nan_to_num(-1), shuffled[name].nan_to_num(-1))
        assert torch.equal(column.nan_to_num(-1), torch.cat([row[name] for row in alone]).nan_to_num(-1))


@pytest.mark.parametrize("size", [None, (SIZE, SIZE + 1), (48, 48)])
def test_no_image_or_a_wrong_size_gets_the_lowest_scores_and_is_not_missing(size):
    task = TASKS[3]
    assert task.target is not None
    scores = judge(task, None if size is None else task.target.resize(size))
    assert all(scores[name] == JUDGE.columns[name].low == 0 for name in MAIN)
    for kind in KINDS:
        assert scores[f"success/{kind}"] == pytest.approx(0.0 if kind in task.tags["kinds"] else math.nan, nan_ok=True)
    with pytest.raises(ValueError, match="photos/17"):
        judge(Task(id="photos/17", instruction="make the sky red"), task.target)


def test_scores_have_the_declared_columns_shapes_and_ranges():
    assert isinstance(JUDGE, Reward)
    many = JUDGE([Sample(task, TASKS[i + 1].target) for i, task in enumerate(TASKS[:64])])
    for name, column in JUDGE.columns.items():
        assert JUDGE([])[name].shape == (0,)
        assert many[name].shape == (64,)
        assert many[name].dtype == torch.float32
        known = many[name][~many[name].isnan()]
        assert column.low <= known.min() <= known.max() <= column.high
        assert column.diagnostic == name.startswith("success/") == bool(many[name].isnan().any())
