"""Suites from the published files to the table, with images made elsewhere and a judge that is a server."""

import json
import math

import pytest
from PIL import Image

from canned_judge import numbered_image, save_numbered_image
from judge_double import KEY, Double, expected_score
from retouch_bench.running import run
from retouch_judge.kinds import Endpoint


@pytest.fixture
def judge(monkeypatch):
    with Double() as server:
        monkeypatch.setenv("DOUBLE_KEY", KEY)
        monkeypatch.setenv("RETOUCH_KEYS", f"DOUBLE_KEY={server.url.removesuffix('/v1')}")
        yield Endpoint(model="double", base_url=server.url, key="DOUBLE_KEY", pause=0.01, longest_pause=0.02)


def server_score(number, name, top=5):
    """The score that the server gives an image."""
    return expected_score(numbered_image(number), name, 0, low=1, high=top, whole=True)


def test_an_imgedit_run_with_a_judge_server_gives_the_expected_table(tmp_path, judge):
    rows = {
        "12": {"id": "a/1.png", "prompt": "add a hat", "edit_type": "add"},
        "7": {"id": "a/2.png", "prompt": "remove the hat", "edit_type": "remove"},
        "9": {"id": "a/2.png", "prompt": "remove the cat", "edit_type": "remove"},
        "8": {"id": "a/gone.png", "prompt": "x", "edit_type": "add"},
    }
    for number in (1, 2):
        save_numbered_image(tmp_path / "data" / "original_images" / "a" / f"{number}.png", number)
    (tmp_path / "data" / "basic_edit.json").write_text(json.dumps(rows))
    for item, number in {"12": 21, "7": 22}.items():
        save_numbered_image(tmp_path / "images" / f"{item}.png", number)
    result = run("imgedit", data=tmp_path / "data", images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out")
    names = ("compliance", "naturalness", "integrity")
    means = [sum(server_score(number, name) for name in names) / 3 for number in (21, 22)]
    assert result.headline == pytest.approx(sum(means) / 2)
    assert result.table["remove"]["score"]["mean"] == pytest.approx(means[1])
    assert [(each["item"], "no image 9.png" in each["reason"]) for each in result.missing] == [("9", True)]
    assert [(each["id"], "gone.png" in each["reason"]) for each in result.about["broken"]] == [("basic_edit.json:4", True)]


def test_kris_scores_that_a_category_lacks_are_not_reported_as_missing(tmp_path, judge):
    biology = {"1": {"ori_img": "1.png", "gt_img": "", "ins_en": "after a month", "explain_en": "it is mouldy"}}
    colour = {"1": {"ori_img": "1.png", "gt_img": "", "ins_en": "make it red", "explain_en": ""}}
    for folder, rows in {"biology": biology, "color_change": colour}.items():
        save_numbered_image(tmp_path / "data" / folder / "1.png", 1)
        (tmp_path / "data" / folder / "annotation.json").write_text(json.dumps(rows))
        save_numbered_image(tmp_path / "images" / f"{folder}-1.png", 30 + len(folder))
    result = run("kris", data=tmp_path / "data", images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out")
    assert not result.missing
    assert [row.reason for row in result.rows] == ["", ""]
    assert result.table["biology"]["knowledge"]["mean"] == server_score(37, "knowledge")
    assert math.isnan(result.table["color_change"]["knowledge"]["mean"])
    assert result.table["color_change"]["score"]["mean"] == pytest.approx(
        sum(server_score(42, name) for name in ("consistency", "instruction", "quality")) / 3
    )


def test_the_table_of_imgedit_multi_turn_has_a_row_for_each_turn(tmp_path, judge):
    save_numbered_image(tmp_path / "data" / "original_images" / "1.png", 1)
    rows = {"1": {"id": "1.png", "turn1": "all green", "turn2": "add fruit"}}
    (tmp_path / "data" / "content_memory.json").write_text(json.dumps(rows))
    save_numbered_image(tmp_path / "images" / "content_memory-1.png", 51)
    save_numbered_image(tmp_path / "images" / "content_memory-1-turn2.png", 52)
    result = run(
        "imgedit-multi-turn", data=tmp_path / "data", images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out"
    )
    restraint = [expected_score(numbered_image(number), "restraint", 0, low=0, high=10) for number in (51, 52)]
    assert [result.table[f"turn {turn}"]["restraint"]["mean"] for turn in (1, 2)] == pytest.approx(restraint)


def test_the_table_of_multi_turn_has_reward_and_preservation_of_each_turn(tmp_path, judge):
    save_numbered_image(tmp_path / "data" / "a.png", 100)
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (0, 0, 4, 8))
    mask.save(tmp_path / "data" / "mask.png")
    rows = [
        {"id": "a", "file_name": "a.png", "instruction": "red", "later": ["green"], "mask": "mask.png"},
        {"id": "b", "file_name": "a.png", "instruction": "red", "later": []},
    ]
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_numbered_image(tmp_path / "images" / "a.png", 151)
    save_numbered_image(tmp_path / "images" / "a-turn2.png", 49)
    result = run("multi-turn", data=tmp_path / "data", images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out")
    # each turn is compared with the turn before, in one of three channels
    assert [result.table[f"turn {turn}"]["l1"]["mean"] for turn in (1, 2)] == pytest.approx([51 / 255 / 3, 102 / 255 / 3], abs=1e-6)
    restraint = [expected_score(numbered_image(number), "restraint", 0, low=0, high=10) for number in (151, 49)]
    assert [result.table[f"turn {turn}"]["restraint"]["mean"] for turn in (1, 2)] == pytest.approx(restraint)
    assert ["later" in each["reason"] for each in result.about["broken"]] == [True]
