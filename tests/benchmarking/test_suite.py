"""The base class of suites: aggregates by hand-computed values, tasks from files, and the table of names."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from retouch import cli
from retouch.rewards.pixels import ShareReward
from retouch.types import Column
from retouch_bench.kinds import find_suite
from retouch_bench.suite import Suite, SuiteItem, require_judge


class RedSuite(Suite):
    """The share of red in each image."""

    name, title = "red", "Red"
    source, licence, size = "https://example.org", "MIT", 3
    protocol: ClassVar[str] = "The share of red."
    task = "text-to-image"
    columns: ClassVar[Mapping[str, Column]] = {"share": Column(0.0, 1.0)}
    headline_column: ClassVar[str] = "share"
    average = "categories"

    def items(self, data):
        kinds = {"a": "one", "b": "two", "c": "two"}
        return [SuiteItem(id=name, prompt=f"draw {name}", category=kind) for name, kind in kinds.items()], []

    def reward(self, judge):
        return ShareReward(channel="red")


def test_the_mean_of_category_means_counts_each_category_once():
    suite = RedSuite()
    items, _ = suite.items(None)
    values = {"share": np.array([0.9, 0.1, 0.3])}
    (found,) = suite.headline(items, values, np.ones((1, 3)))["share"]
    assert found == pytest.approx((0.9 + 0.2) / 2)
    resampled = suite.headline(items, values, np.array([[0.0, 1, 2], [3, 0, 0], [0, 0, 0]]))["share"]
    assert resampled[:2] == pytest.approx([(0.1 + 2 * 0.3) / 3, 0.9])
    assert np.isnan(resampled[2])


def test_a_missing_score_is_left_out_and_is_not_0():
    suite = RedSuite()
    items, _ = suite.items(None)
    (found,) = suite.headline(items, {"share": np.array([0.9, np.nan, 0.3])}, np.ones((1, 3)))["share"]
    assert found == pytest.approx((0.9 + 0.3) / 2)


def test_a_task_has_the_files_of_its_item_and_a_later_turn_edits_the_previous_image(tmp_path):
    for name, colour in (("source", "blue"), ("mask", "white"), ("reference", "green"), ("target", "red")):
        Image.new("L" if name == "mask" else "RGB", (4, 4), colour).save(tmp_path / f"{name}.png")
    files = {name: tmp_path / f"{name}.png" for name in ("source", "mask", "reference", "target")}
    item = SuiteItem(id="7", prompt="first", later=("second",), category="add", text="hello", fields={"key": 1}, **files)
    task = RedSuite().task_for(item)
    assert (task.id, task.instruction, task.text, task.tags, task.meta) == ("7", "first", "hello", {"category": "add"}, {"key": 1})
    assert task.images[0].getpixel((0, 0)) == (0, 0, 255)
    assert task.mask is not None
    assert task.reference is not None
    assert task.target is not None
    edited = Image.new("RGB", (4, 4), "yellow")
    second = RedSuite().task_for(item, turn=1, previous=edited)
    assert (second.instruction, second.images, item.turns) == ("second", (edited,), 2)


def test_suites_are_found_by_name_and_take_options():
    suite = find_suite("playground", {"tasks": 4})
    items, broken = suite.items(None)
    assert (len(items), broken, items[0].category) == (4, [], "1 edit")
    task = suite.task_for(items[1])
    assert (task.id, task.instruction) == (items[1].id, items[1].prompt)
    with pytest.raises(ValueError, match="did you mean 'playground'"):
        find_suite("playgroud")
    with pytest.raises(ValueError, match="unknown key"):
        find_suite("playground", {"task": 4})
    with pytest.raises(ValueError, match="leave --data out"):
        suite.items(Path("x"))
    with pytest.raises(ValueError, match="name one with --judge"):
        require_judge(suite, None)


@pytest.mark.parametrize("judge", ['{"kind": "endpoint"', ' {"kind": "viescore", }', "{"])
def test_a_judge_argument_with_invalid_json_exits_with_a_clear_message(judge, capsys):
    assert cli.main(["bench", "playground", "--images", "nowhere", "--judge", judge]) == 2
    error = capsys.readouterr().err
    assert f"{judge!r} is not JSON; use a reward section as in a recipe, or a name" in error
    assert "Traceback" not in error
