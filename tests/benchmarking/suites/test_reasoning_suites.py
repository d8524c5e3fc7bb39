"""KRIS-Bench and RISEBench: their schemas, the images that their judges receive, and the published weights."""

import json
import math

import pytest

from canned_judge import JUDGE, CannedClient, headline, number_of, save_numbered_image, scored
from retouch.types import Sample
from retouch_bench.suites.editing import KrisSuite, RiseSuite
from retouch_judge.base import Panel

EASY = {"consistency": 4, "instruction": 5, "knowledge": 2, "quality": 3}


def by_name(table):
    """Answers by the names that a question asks for."""
    return lambda question, _: {"reasoning": "", **{name: table[name] for name in question.form.scales}}


def write_kris(folder):
    biology = {
        "1": {"ori_img": "1.png", "gt_img": "", "ins_en": "after a month", "explain_en": "it is mouldy"},
        "2": {"ori_img": "1.png", "gt_img": "", "ins_en": "next year", "explain_en": ""},
    }
    temporal = {"1": {"ori_img": ["7-1.png", "7-2.png"], "gt_img": "7-3.png", "ins_en": "the third frame", "explain_en": ""}}
    colour = {"1": {"ori_img": "gone.png", "gt_img": "", "ins_en": "red", "explain_en": ""}}
    for category, rows in {"biology": biology, "temporal_prediction": temporal, "color_change": colour}.items():
        (folder / category).mkdir()
        (folder / category / "annotation.json").write_text(json.dumps(rows))
    for number, name in enumerate(("biology/1.png", *(f"temporal_prediction/7-{frame}.png" for frame in (1, 2, 3))), 1):
        save_numbered_image(folder / name, number)
    return folder


def test_kris_score_is_the_mean_of_the_columns_of_its_category(tmp_path):
    suite = KrisSuite()
    items, broken = suite.items(write_kris(tmp_path))
    assert [item.id for item in items] == ["biology-1", "biology-2", "temporal_prediction-1"]
    assert [(each.id, "gone.png" in each.reason) for each in broken] == [("annotation.json:1", True)]
    found = scored(suite, items, by_name(EASY))
    assert found["biology-1"] == pytest.approx({"score": (4 + 5 + 2 + 3) / 4, **EASY})
    assert found["temporal_prediction-1"]["score"] == pytest.approx((4 + 5 + 3) / 3)
    assert math.isnan(found["temporal_prediction-1"]["knowledge"])
    assert headline(suite, items, found)["score"] == pytest.approx((3.5 + 3.5 + 4) / 3)  # knowledge needs no explanation
    missing = scored(suite, items, lambda question, _: "?" if "quality" in question.form.scales else by_name(EASY)(question, _))
    assert math.isnan(missing["biology-1"]["score"])


def shown_for(suite, item):
    """The numbers of the images in each question of the judge about an item's unedited image."""
    client = CannedClient(by_name({**EASY, "reasoning_score": 5}))
    task = suite.task_for(item)
    suite.reward(JUDGE).with_model(Panel(client))([Sample(task, task.images[0])])
    return [[number_of(part) for part in question.parts if not isinstance(part, str)] for question in client.asked]


def test_judges_receive_all_source_images_and_the_reference_if_there_is_one(tmp_path):
    (tmp_path / "kris").mkdir()
    kris, rise = KrisSuite(), RiseSuite()
    items, _ = kris.items(write_kris(tmp_path / "kris"))
    assert [number_of(image) for image in kris.task_for(items[2]).images] == [2, 3]
    assert shown_for(kris, items[2]) == [[2, 3, 2], [2, 3, 4, 2], [2]]  # consistency, instruction, quality
    items, _ = rise.items(write_rise(tmp_path / "rise"))
    assert [shown_for(rise, items[place]) for place in (0, 2)] == [[[1, 1], [1], [1]], [[50, 3], [50, 3], [3]]]


def rise_row(index, category, **more):
    return {
        "index": index, "category": category, "subtask": "x", "instruction": f"edit {index}",
        "image": f"{category}_images/{index}.png", **more,
    }  # fmt: skip


def write_rise(folder):
    folder.mkdir(exist_ok=True)
    rows = [
        rise_row("temporal_reasoning_1", "temporal_reasoning", reference="it is ripe"),
        rise_row("causal_reasoning_1", "causal_reasoning", reference="it breaks", consistency_free=True),
        rise_row("spatial_reasoning_1", "spatial_reasoning", reference_img="spatial_reasoning_images/ref.png"),
        rise_row("logical_reasoning_1", "logical_reasoning", reference_txt="a circle"),
        rise_row("logical_reasoning_2", "logical_reasoning", reference_txt="a square"),
        rise_row("causal_reasoning_2", "causal_reasoning"),
        rise_row("x", "musical_reasoning", reference="a song"),
    ]
    (folder / "datav2_total_w_subtask.json").write_text(json.dumps(rows))
    for number, row in enumerate(rows, 1):
        save_numbered_image(folder / "data" / row["image"], number)
    save_numbered_image(folder / "data" / "spatial_reasoning_images" / "ref.png", 50)
    return folder


def test_rise_weighs_its_scores_as_published(tmp_path):
    suite = RiseSuite()
    items, broken = suite.items(write_rise(tmp_path))
    assert len(items) == 5
    assert ["correct result" in broken[0].reason, "musical" in broken[1].reason] == [True, True]
    answers = {
        1: {"consistency": 5, "reasoning_score": 5, "quality": 5}, 2: {"reasoning_score": 5, "quality": 5},
        3: {"consistency": 4, "reasoning_score": 1, "quality": 5}, 4: {"consistency": 1, "reasoning_score": 1},
        5: {"consistency": 1, "reasoning_score": 0},
    }  # fmt: skip
    found = scored(suite, items, lambda question, number: by_name(answers[number])(question, number))
    one, free, wrong, solved, unsolved = (found[item.id] for item in items)
    assert (one["solved"], one["score"]) == (1, 100)
    assert (free["solved"], free["score"]) == (0, 100)  # as published: without a consistency score nothing is solved
    assert (wrong["solved"], wrong["score"]) == (0, pytest.approx(25 * (0.5 * (0.3 * 4 + 0.5 * 1 + 0.2 * 5) - 1)))
    assert (solved["solved"], solved["score"], solved["reasoning"]) == (1, 100, 5)
    assert (unsolved["solved"], unsolved["score"]) == (0, pytest.approx(25 * (0.5 * (0.3 * 5 + 0.7 * 1) - 1)))
    assert math.isnan(solved["quality"])
    assert headline(suite, items, found)["solved"] == pytest.approx(2 / 5)
    missing = scored(suite, items, lambda question, number: "" if number == 1 else by_name(answers[number])(question, number))
    assert math.isnan(missing[items[0].id]["solved"])
    assert headline(suite, items, missing)["solved"] == pytest.approx(1 / 4)
