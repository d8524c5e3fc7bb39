"""Suites of prompts: rows of the published schema, the published formula computed by hand, and rows that cannot be used."""

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from canned_judge import headline, scored
from retouch.types import Sample, Task
from retouch_bench.suites.text_to_image import (
    DpgSuite,
    GenEval2Suite,
    GenEvalSuite,
    LongTextSuite,
    NegationSuite,
    OcrSuite,
    OwnPromptsSuite,
    ReadTextReward,
    UniGenSuite,
    accuracy,
    word_share,
)
from retouch_rewards.geneval import GenEvalModels
from retouch_rewards.networks import Detection
from retouch_rewards.ocr import TextLine
from retouch_worlds.testing import check_reward
from suite_rows import DPG_COLUMNS, dpg_row, lines, table

PHOTOS = os.environ.get("RETOUCH_TRIPLETS", "")


def test_geneval_is_the_mean_of_its_tasks(tmp_path):
    rows = [
        {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
        {"tag": "single_object", "include": [{"class": "cow", "count": 1}], "prompt": "a photo of a cow"},
        {
            "tag": "counting", "include": [{"class": "cow", "count": 2}], "exclude": [{"class": "cow", "count": 3}],
            "prompt": "a photo of two cows",
        },
        {"tag": "painting", "include": [{"class": "cow", "count": 1}], "prompt": "a painted cow"},
        {"tag": "colors", "include": [{"class": "cow", "count": 1, "color": "mauve"}], "prompt": "a mauve cow"},
        "{",
    ]  # fmt: skip
    suite = GenEvalSuite()
    items, broken = suite.items(lines(tmp_path / "evaluation_metadata.jsonl", rows))
    assert [item.category for item in items] == ["single_object", "single_object", "counting"]
    assert [each.id.rpartition(":")[2] for each in broken] == ["4", "5", "6"]
    assert ["painting" in broken[0].reason, "mauve" in broken[1].reason, "not JSON" in broken[2].reason] == [True] * 3
    assert suite.images_per_item == 4
    cow = Detection("cow", 0.9, (0, 0, 2, 2))
    far = Detection("cow", 0.9, (5, 5, 8, 8))
    reward = suite.reward(None).with_model(
        GenEvalModels(lambda image, names: [one for one in (cow, far) if one.name in names], None)
    )
    scores = {
        item.id: {name: column.item() for name, column in reward([Sample(suite.task_for(item), Image.new("RGB", (8, 8)))]).items()}
        for item in items
    }
    # single_object: a bench is not there, a cow is; counting: two cows are there
    assert headline(suite, items, scores)["correct"] == pytest.approx((0.5 + 1) / 2)


def test_negation_has_one_share_for_each_number_of_positive_and_negated_statements(tmp_path):
    """The image shows a red cow to the left of a green dog."""
    cow, dog = {"class": "cow"}, {"class": "dog"}
    not_red, not_green = {**cow, "color": "red", "negated": True}, {**cow, "color": "green", "negated": True}
    right = {**dog, "position": ["right of", 0]}
    rows = [
        {"include": [{**cow, "color": "red"}], "prompt": "a red cow"},
        {"include": [not_red], "prompt": "a cow that is not red"},
        {"include": [not_green], "prompt": "a cow that is not green"},
        {"include": [{**not_green, "class": "cat"}], "prompt": "a cat that is not green, and there is none"},
        {"include": [cow], "exclude": [{"class": "dog", "count": 1}], "prompt": "a cow and no dog"},
        {"include": [cow, {**right, "negated": True}], "prompt": "a dog that is not right of a cow"},
        {"include": [cow, right, not_green], "prompt": "a dog right of a cow that is not green"},
        {"include": [{**cow, "negated": True}], "prompt": "not a cow"},
        {"include": [{**right, "position": ["right of", 0], "color": "red", "negated": True}], "prompt": "two at once"},
    ]
    suite = NegationSuite()
    items, broken = suite.items(lines(tmp_path / "negated.jsonl", rows))
    one, single, both = "1 positive, 0 negated", "0 positive, 1 negated", "1 positive, 1 negated"
    assert [item.category for item in items] == [one, *[single] * 5, both]
    assert ["either a color or a position" in broken[0].reason, "an earlier requirement" in broken[1].reason] == [True, True]
    found = [Detection("cow", 0.9, (0, 4, 2, 6)), Detection("dog", 0.9, (6, 4, 8, 6))]
    reward = suite.reward(None).with_model(
        GenEvalModels(
            lambda image, names: [each for each in found if each.name in names],
            lambda image, boxes, name: ["red" if name == "cow" else "green"] * len(boxes),
        )
    )
    correct = [reward([Sample(suite.task_for(item), Image.new("RGB", (8, 8)))])["correct"].item() for item in items]
    assert correct == [1, 0, 1, 0, 0, 0, 1]
    scores = {item.id: {"correct": value} for item, value in zip(items, correct, strict=True)}
    assert headline(suite, items, scores)["correct"] == pytest.approx((1 + 1 / 5 + 1) / 3)


def test_geneval2_takes_the_geometric_mean(tmp_path):
    row = {
        "prompt": "four white bicycles",
        "atom_count": 3,
        "vqa_list": [["How many bicycles are there?", "four"], ["Are the bicycles white?", "Yes"]],
        "skills": ["count", "attribute"],
    }
    rows = [row, {**row, "prompt": "b", "vqa_list": [["x?"]]}, {**row, "prompt": "c", "atom_count": "three"}]
    suite = GenEval2Suite()
    items, broken = suite.items(lines(tmp_path / "geneval2_data.jsonl", rows))
    assert [item.category for item in items] == ["3 atoms"]
    assert ["vqa_list" in broken[0].reason, "atom_count" in broken[1].reason] == [True, True]
    found = scored(suite, items, lambda question, _: 0.9 if "white" in question.parts[0] else 0.4)
    assert found[items[0].id] == pytest.approx({"gm": math.sqrt(0.9 * 0.4), "am": 0.65}, abs=1e-6)
    missing = scored(suite, items, lambda question, _: 0.9 if "white" in question.parts[0] else "perhaps")
    assert math.isnan(missing[items[0].id]["am"])


def dpg_file(path, rows):
    return table(path, [DPG_COLUMNS, *rows])


def test_dpg_questions_that_depend_on_a_negative_answer_score_0(tmp_path):
    rows = [
        dpg_row("1", 1, "0", "entity", "Is there a cat?"), dpg_row("1", 2, "1", "attribute", "Is the cat grey?"),
        dpg_row("1", 3, "2", "attribute", "Is the grey cat striped?"), dpg_row("1", 4, "0", "global", "Is it a photo?"),
        dpg_row("2", 1, "0", "entity", "Is there a dog?"), dpg_row("3", 1, "7", "entity", "Is there a bird?"),
        dpg_row("4", "x", "0", "entity", "Is there a fish?"),
    ]  # fmt: skip
    suite = DpgSuite()
    items, broken = suite.items(dpg_file(tmp_path / "dpg_bench.csv", rows))
    assert [(item.id, item.prompt) for item in items] == [("1", "prompt of 1"), ("2", "prompt of 2")]
    assert ["no question 7" in broken[0].reason, "whole numbers" in broken[1].reason] == [True, True]
    said = {"cat?": "no", "grey?": "yes", "striped?": "yes", "photo?": "yes", "dog?": "yes"}

    def reply(question, _):
        return next(answer for word, answer in said.items() if word in question.parts[0])

    found = scored(suite, items, reply)
    # the first prompt: no, then no because of it, then no because of that, yes
    assert found["1"]["score"] == pytest.approx(1 / 4)
    assert (found["1"]["entity"], found["1"]["attribute"], found["1"]["global"]) == (0, 1, 1)  # without regard to dependence
    assert math.isnan(found["1"]["relation"])
    total = headline(suite, items, found)
    assert (total["score"], total["entity"], total["attribute"]) == pytest.approx(((1 / 4 + 1) / 2, 1 / 2, 1))
    assert math.isnan(total["relation"])
    missing = scored(suite, items, lambda question, _: "maybe" if "dog" in question.parts[0] else reply(question, _))
    assert math.isnan(missing["2"]["score"])
    assert headline(suite, items, missing)["score"] == pytest.approx(1 / 4)


def unigen_file(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "prompt_en", "sub_dims_en"])
        for index, prompt, points in rows:
            named = {"Testpoints": list(points), "Testpoint Description": list(points.values())}
            writer.writerow([index, prompt, json.dumps({"Primary Categories": "Art", **named})])
    return path


def test_unigenbench_rows_without_a_json_object_are_broken_and_other_rows_are_read(tmp_path):
    path = unigen_file(tmp_path / "test_prompts_en.csv", [(0, "two pandas", {"Style": "ink"})])
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([[1, "a cat", '["Style"]'], [2, "a dog", "null"], [3, "a bird", "{"]])
    items, broken = UniGenSuite().items(path)
    assert [item.id for item in items] == ["0"]
    assert ["not an object" in each.reason for each in broken] == [True, True, False]


def test_unigenbench_pools_the_points_of_each_dimension(tmp_path):
    rows = [
        (0, "two pandas", {"Style": "ink", "Attribute - Quantity": "two", "Attribute - Color": "black"}),
        (1, "a cat", {"Attribute - Size": "small"}),
        (2, "a dog", {"Smell": "wet"}),
    ]
    suite = UniGenSuite()
    items, broken = suite.items(unigen_file(tmp_path / "test_prompts_en.csv", rows))
    assert [item.id for item in items] == ["0", "1"]
    assert "Smell" in broken[0].reason
    answers = {1: {"point_1": 1, "point_2": 1, "point_3": 0}, 2: {"point_1": 0}}
    found = scored(suite, items, lambda _, number: {"reasoning": "", **answers[number]})
    assert found["0"]["attribute"] == 0.5
    total = headline(suite, items, found)
    # style 1 of 1, attribute 1 of 3 points; overall is the mean of the two
    assert (total["style"], total["attribute"], total["overall"]) == pytest.approx((1, 1 / 3, 2 / 3))
    assert math.isnan(total["grammar"])
    missing = scored(suite, items, lambda _, number: {"reasoning": "", **answers[2]})  # two points have no answer
    assert math.isnan(missing["0"]["overall"])
    assert headline(suite, items, missing)["attribute"] == 0


def test_ocr_accuracy_and_word_share_equal_hand_computed_values():
    assert accuracy("Open 24", ["OPEN", "24 hours"]) == 1
    assert accuracy("hello", ["hallo"]) == pytest.approx(0.8)
    assert accuracy("ox", ["something else"]) == 0  # at most one mistake a letter
    assert word_share("The cat, the mat.", ["THE CAT", "the dog"], chinese=False) == pytest.approx(3 / 4)
    assert word_share("红色的猫", ["猫 红"], chinese=True) == pytest.approx(2 / 4)
    assert word_share("...", ["x"], chinese=False) == 0


def read(suite, items, texts):
    """Each item's scores where its image reads as ``texts[i]``."""
    found = {}
    for item, text in zip(items, texts, strict=True):
        reward = suite.reward(None).with_model(lambda image, text=text: [TextLine(line, 1.0) for line in text])
        given = {name: column.item() for name, column in reward([Sample(suite.task_for(item), Image.new("RGB", (8, 8)))]).items()}
        found[item.id] = suite.score(item, given)
    return found


def test_ocr_is_a_mean_over_prompts(tmp_path):
    suite = OcrSuite()
    items, broken = suite.items(lines(tmp_path / "test.txt", ['A sign that reads "Open"', "no text", 'A cup with "tea"']))
    assert [item.text for item in items] == ["Open", "tea"]
    assert [(each.id, each.reason) for each in broken] == [("test.txt:2", "no text between double quotes")]
    found = read(suite, items, [["open late"], ["tee"]])
    assert headline(suite, items, found)["accuracy"] == pytest.approx((1 + 2 / 3) / 2)
    assert found[items[0].id]["exact"] == pytest.approx(1 - 4 / 8)


def test_longtext_pools_words(tmp_path):
    rows = [
        {"prompt_id": 0, "prompt": "a poster", "category": "poster", "length": "short", "text": ["Big sale", "today only"]},
        {"prompt_id": 1, "prompt": "a sign", "category": "sign", "length": "short", "text": ["Stop!"]},
        {"prompt_id": 2, "prompt": "nothing", "category": "sign", "length": "short", "text": []},
        {"prompt_id": 1, "prompt": "again", "category": "sign", "length": "short", "text": ["x"]},
    ]
    suite = LongTextSuite()
    items, broken = suite.items(lines(tmp_path / "text_prompts.jsonl", rows))
    assert [(item.id, item.text, item.category) for item in items] == [
        ("0", "Big sale today only", "poster"),
        ("1", "Stop!", "sign"),
    ]
    assert len(broken) == 2
    found = read(suite, items, [["big", "TODAY sale sale"], ["go"]])
    # 3 of 4 words, and 0 of 1
    assert headline(suite, items, found)["words"] == pytest.approx(3 / 5)


def test_read_text_reward_passes_the_contract_checks_and_requires_a_text():
    reward = ReadTextReward().with_model(lambda image: [TextLine(f"{np.asarray(image).mean():.0f}", 0.5)])
    check_reward(reward, [Sample(Task(str(n), "", text="17"), Image.new("RGB", (8, 8), (n, n, n))) for n in (17, 90)])
    with pytest.raises(ValueError, match="no text"):
        reward([Sample(Task("t", "", text=" "), None)])


def test_ocr_suite_reads_rendered_text_with_rapidocr(tmp_path):
    suite = OcrSuite()
    items, _ = suite.items(lines(tmp_path / "test.txt", ['A sign that reads "open 24"']))
    image = Image.new("RGB", (320, 90), (240, 240, 230))
    ImageDraw.Draw(image).text((20, 20), "open 24", fill=(20, 30, 90), font=ImageFont.load_default(40))
    given = suite.reward(None)([Sample(suite.task_for(items[0]), image)])
    assert {name: column.item() for name, column in given.items()} == {"accuracy": 1, "exact": 1, "words": 1}


@pytest.mark.skipif(not PHOTOS, reason="RETOUCH_TRIPLETS names no folder of triplets")
def test_ocr_suite_reads_text_in_photographs_with_rapidocr(tmp_path):
    wanted = dict(line.split("-", 1) for line in (Path(PHOTOS) / "self_bench.txt").read_text().splitlines() if line)
    suite = OcrSuite()
    items, _ = suite.items(lines(tmp_path / "test.txt", [f'A photo with "{text}"' for text in wanted.values()]))
    images = [Image.open(Path(PHOTOS) / f"test{number}_source.png").convert("RGB") for number in wanted]
    samples = [Sample(suite.task_for(item), image) for item, image in zip(items, images, strict=True)]
    assert suite.reward(None)(samples)["accuracy"].tolist() == [1.0] * len(samples)


def test_prompts_are_read_from_the_three_kinds_of_lists(tmp_path):
    suite = OwnPromptsSuite()
    (tmp_path / "drawbench.csv").write_text('Prompts,Category\n"A red car, parked",Colors\nTwo cats,Counting\n,Counting\n')
    items, broken = suite.items(tmp_path / "drawbench.csv")
    assert [(item.prompt, item.category) for item in items] == [("A red car, parked", "Colors"), ("Two cats", "Counting")]
    assert len(broken) == 1
    assert [item.prompt for item in suite.items(lines(tmp_path / "p.txt", ["one", "two"]))[0]] == ["one", "two"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "category": "first"}\n')
    assert suite.items(tmp_path / "p.jsonl")[0][0].category == "first"
