"""Suites of edits: rows of the published schema, the published formula computed by hand, and rows that cannot be used."""

import json
import math

import pytest
from PIL import Image

from canned_judge import JUDGE, headline, number_of, numbered_image, save_numbered_image, scored
from retouch.types import Sample
from retouch_bench.suites.editing import (
    ComplexEditSuite,
    EarlSuite,
    GEditSuite,
    ImgEditHardSuite,
    ImgEditMultiTurnSuite,
    ImgEditSuite,
    PreservationSuite,
)
from suite_rows import parquet, stored


def vie(table):
    """VIEScore's answers: (success, restraint, naturalness, cleanness) by the number of the judged image."""

    def reply(question, number):
        success, restraint, naturalness, cleanness = table[number]
        if "success" in question.form.scales:
            return {"reasoning": "", "success": success, "restraint": restraint}
        return {"reasoning": "", "naturalness": naturalness, "cleanness": cleanness}

    return reply


def gedit_row(key, task, *, language="en", intersection=True, image=1):
    return {
        "task_type": task, "key": key, "instruction": f"edit {key}", "instruction_language": language,
        "input_image": stored(90), "input_image_raw": stored(image), "Intersection_exist": intersection,
    }  # fmt: skip


def test_gedit_averages_task_types_and_selects_one_language(tmp_path):
    rows = [
        gedit_row("a", "color_alter"), gedit_row("b", "color_alter", intersection=False), gedit_row("c", "text_change"),
        gedit_row("a", "color_alter", language="cn"),
    ]  # fmt: skip
    parquet(tmp_path / "gedit.parquet", rows)
    suite = GEditSuite()
    items, broken = suite.items(tmp_path / "gedit.parquet")
    assert [item.id for item in items] == ["a", "b", "c"]
    assert not broken
    task = suite.task_for(items[0])
    assert (task.instruction, number_of(task.images[0])) == ("edit a", 1)  # the raw image, not its 512-pixel copy
    assert items[0].cluster == items[1].cluster  # the same source image
    found = scored(suite, items, vie({1: (9, 4, 9, 10), 2: (1, 8, 4, 7), 3: (8, 8, 2, 5)}))
    assert found["a"] == pytest.approx({"sc": 4, "pq": 9, "overall": 6})
    # overall: color_alter (6 + 2) / 2 = 4, text_change 4; sc: (4 + 1) / 2 and 8; pq: (9 + 4) / 2 and 2
    assert headline(suite, items, found) == pytest.approx({"sc": 5.25, "pq": 4.25, "overall": 4.0})
    intersection, _ = GEditSuite(subset="intersection").items(tmp_path / "gedit.parquet")
    assert [item.id for item in intersection] == ["a", "c"]
    chinese, _ = GEditSuite(language="cn").items(tmp_path / "gedit.parquet")
    assert [item.id for item in chinese] == ["a"]


def test_gedit_reports_broken_rows_and_excludes_missing_answers_from_the_mean(tmp_path):
    rows = [
        gedit_row("a", "color_alter"), gedit_row("a", "color_alter"), gedit_row("", "color_alter"),
        {**gedit_row("d", "color_alter"), "instruction": " "},
        {**gedit_row("e", "color_alter"), "input_image_raw": {"bytes": b"no image", "path": "e.png"}},
        gedit_row("f", "text_change"),
    ]  # fmt: skip
    parquet(tmp_path / "gedit.parquet", rows)
    suite = GEditSuite()
    items, broken = suite.items(tmp_path / "gedit.parquet")
    assert [item.id for item in items] == ["a", "f"]
    reasons = [each.reason for each in broken]
    assert [each.id.rpartition(":")[2] for each in broken] == ["2", "3", "4", "5"]
    for reason, word in zip(
        reasons, ["second row with the id 'a'", "'key': no text", "instruction is empty", "not a PNG"], strict=True
    ):
        assert word in reason
    found = scored(suite, items, lambda question, number: "I cannot say." if number == 1 else vie({2: (9, 9, 4, 4)})(question, 2))
    assert math.isnan(found["a"]["overall"])
    assert headline(suite, items, found)["overall"] == 6  # the mean of the scores that exist; a missing answer is not 0


def complex_rows(count):
    names = ["ADD", "REMOVE"]
    compound = [{"reasoning": "", "compound_instruction": f"level {level}"} for level in range(1, 9)]
    sequence = [{"name": names[level % 2], "instruction": f"step {level}"} for level in range(1, 9)]
    edit = {"sequence": sequence, "original_sequence": sequence, "reasoning": "", "compound": compound}
    return [{"image": stored(number), "edit": edit} for number in range(1, count + 1)]


def test_complex_edit_averages_levels(tmp_path):
    parquet(tmp_path / "data" / "test_real-00000-of-00001.parquet", complex_rows(1))
    suite = ComplexEditSuite(levels="1-2")
    items, broken = suite.items(tmp_path)
    assert [(item.category, item.prompt) for item in items] == [("level 1", "level 1"), ("level 2", "level 2")]
    assert not broken
    assert suite.reward(JUDGE).n_evals == 20

    def reply(question, number):
        names = list(question.form.scales)
        if names[0].startswith("following"):
            return {"reasoning": "", **dict(zip(names, [9, 4], strict=False))}
        return {"reasoning": "", names[0]: {"preservation": 6, "quality": 3}[names[0]]}

    found = scored(suite, items, reply)
    assert found[items[0].id] == pytest.approx(
        {"instruction_following": 9, "identity_preservation": 6, "perceptual_quality": 3, "overall": 6}
    )
    assert found[items[1].id]["instruction_following"] == 6.5  # the mean of the two operations
    # overall of level 2: (6.5 + 6 + 3) / 3
    assert headline(suite, items, found)["overall"] == pytest.approx((6 + 15.5 / 3) / 2)


def imgedit_folder(tmp_path, rows, name="basic_edit.json"):
    for number, row in enumerate(rows.values(), 1):
        if "id" in row:
            save_numbered_image(tmp_path / "original_images" / row["id"], number)
    (tmp_path / name).write_text(json.dumps(rows))
    return tmp_path


def test_imgedit_averages_types(tmp_path):
    rows = {
        "1082": {"id": "animal/1.png", "prompt": "make the shell smooth", "edit_type": "adjust"},
        "1068": {"id": "animal/2.png", "prompt": "darken the fur", "edit_type": "alter"},
        "673": {"id": "style/3.png", "prompt": "as a woodcut", "edit_type": "style"},
    }
    suite = ImgEditSuite()
    items, broken = suite.items(imgedit_folder(tmp_path, rows))
    assert [(item.id, item.category) for item in items] == [("1082", "adjust"), ("1068", "adjust"), ("673", "style")]
    assert not broken
    answers = {1: (1, 1, 1), 2: (4, 4, 2), 3: (5, 4, 3)}
    found = scored(
        suite,
        items,
        lambda _, number: {"reasoning": "", **dict(zip(("compliance", "naturalness", "integrity"), answers[number], strict=True))},
    )
    assert found["1068"] == pytest.approx({"score": 10 / 3, "compliance": 4, "naturalness": 4, "integrity": 2})
    # adjust: (1 + 10 / 3) / 2; style: 4
    assert headline(suite, items, found)["score"] == pytest.approx(((1 + 10 / 3) / 2 + 4) / 2)


def test_imgedit_reports_invalid_rows_and_gives_nan_for_invalid_answers(tmp_path):
    rows = {
        "1": {"id": "a/1.png", "prompt": "x", "edit_type": "add"}, "2": {"id": "a/2.png", "prompt": "x", "edit_type": "melt"},
        "3": {"prompt": "x", "edit_type": "add"}, "4": {"id": "a/4.png", "edit_type": "add"},
    }  # fmt: skip
    folder = imgedit_folder(tmp_path, rows)
    (folder / "basic_edit.json").write_text(json.dumps({**rows, "5": {**rows["1"], "id": "../secret.png"}}))
    suite = ImgEditSuite()
    items, broken = suite.items(folder)
    assert [item.id for item in items] == ["1"]
    assert [(each.id, word in each.reason) for each, word in zip(broken, ["melt", "'id'", "'prompt'", "leaves"], strict=True)] == [
        (f"basic_edit.json:{line}", True) for line in (2, 3, 4, 5)
    ]
    for wrong in ({"reasoning": "", "compliance": 6, "naturalness": 3, "integrity": 3}, "{", {"compliance": 3}):
        assert math.isnan(scored(suite, items, lambda *_, wrong=wrong: wrong)["1"]["score"])
    with pytest.raises(ValueError, match="PKU-YuanGroup/ImgEdit"):
        suite.items(None)
    with pytest.raises(ValueError, match=r"UGE_edit\.json: no such file"):
        ImgEditHardSuite().items(folder)


def test_imgedit_hard_is_a_mean(tmp_path):
    rows = {"1": {"id": "1.png", "prompt": "x"}, "2": {"id": "2.png", "prompt": "y"}}
    suite = ImgEditHardSuite()
    items, _ = suite.items(imgedit_folder(tmp_path, rows, "UGE_edit.json"))
    found = scored(suite, items, lambda _, number: f"Brief reasoning: well.\nScore: {number + 2}")
    assert headline(suite, items, found) == {"score": 3.5}


def test_each_imgedit_turn_edits_the_image_of_the_previous_turn(tmp_path):
    rows = {"1": {"id": "1.png", "turn1": "all green", "turn2": "add fruit", "turn3": "another plate"}}
    imgedit_folder(tmp_path, {**rows, "2": {"id": "2.png", "turn1": "alone"}}, "content_memory.json")
    suite = ImgEditMultiTurnSuite()
    items, broken = suite.items(tmp_path)
    assert [(item.id, item.turns, item.category) for item in items] == [("content_memory-1", 3, "content_memory")]
    assert "turn2" in broken[0].reason
    (tmp_path / "version_backtracking.json").write_text(json.dumps(rows))  # the files of all categories count from 1
    assert [item.id for item in suite.items(tmp_path)[0]] == ["content_memory-1", "version_backtracking-1"]
    tasks = [suite.task_for(items[0], turn=turn, previous=numbered_image(77) if turn else None) for turn in range(3)]
    assert [task.instruction for task in tasks] == ["all green", "add fruit", "another plate"]
    assert [number_of(task.images[0]) for task in tasks] == [1, 77, 77]
    found = scored(suite, items, vie({1: (9, 4, 9, 10)}), turns=3)
    assert len(found) == 3
    assert found["content_memory-1/2"] == pytest.approx({"sc": 4, "pq": 9, "overall": 6, "restraint": 4})


def earl_folder(tmp_path):
    parquet(
        tmp_path / "omniedit.parquet",
        [
            {
                "omni_edit_id": "task_obj_1", "task": "addition", "src_img": stored(1), "edited_img": stored(9),
                "edited_prompt_list": ["add a cat", "add a small grey cat to the left"],
            }
        ],
    )  # fmt: skip
    emu = {"instruction": "e", "image": stored(1), "task": "add", "split": "test", "idx": 1, "hash": "x"}
    parquet(tmp_path / "emuedit.parquet", [{**emu, "input_caption": "a room", "output_caption": "a room with a cat"}])
    parquet(tmp_path / "aurora.parquet", [{"input": stored(1), "instruction": "a", "source": "ag"}])
    vismin = {"source_image": stored(1), "edit_instruction": "edit_instruction: v", "edited_image": stored(2), "id": "7"}
    parquet(tmp_path / "vismin" / "counting.parquet", [vismin])
    save_numbered_image(tmp_path / "magicbrush" / "images" / "242679" / "242679-input.png", 1)
    turns = [{"input": "242679-input.png", "mask": "m.png", "output": "o.png", "instruction": "m"}, {"input": None}]
    (tmp_path / "magicbrush" / "edit_turns.json").write_text(json.dumps(turns))
    save_numbered_image(tmp_path / "i2ebench" / "Counting" / "input" / "1.png", 1)
    (tmp_path / "i2ebench" / "Counting" / "Counting.json").write_text(json.dumps({"1": {"image": "1.png", "ori_exp": "i"}}))
    (tmp_path / "i2ebench" / "Counting" / "Counting2.json").write_text("{}")
    return tmp_path


def test_earl_averages_six_sets(tmp_path):
    suite = EarlSuite()
    items, broken = suite.items(earl_folder(tmp_path))
    assert [item.category for item in items] == ["omniedit", "emuedit", "aurora", "magicbrush", "vismin", "i2ebench"]
    assert [item.prompt for item in items] == ["add a cat", "e", "a", "m", "v", "i"]
    assert [each.id for each in broken] == ["magicbrush:2"]
    assert len({item.cluster for item in items}) == 6
    found = scored(suite, items, vie({number: (number, 10, 4, 5) for number in range(1, 7)}))
    # each set has one image: overall = sqrt(number x 4)
    expected = sum(math.sqrt(4 * number) for number in range(1, 7)) / 6
    assert headline(suite, items, found)["overall"] == pytest.approx(expected)
    two, _ = EarlSuite(sets=("vismin", "aurora")).items(tmp_path)
    assert [item.category for item in two] == ["vismin", "aurora"]
    (tmp_path / "aurora.parquet").unlink()
    with pytest.raises(ValueError, match=r"aurora.*no such file"):
        suite.items(tmp_path)


def test_preservation_is_measured_outside_the_mask(tmp_path):
    save_numbered_image(tmp_path / "a.png", 100)
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (0, 0, 4, 8))
    mask.save(tmp_path / "mask.png")
    Image.new("L", (8, 8), 255).save(tmp_path / "all.png")
    rows = [
        {"file_name": "a.png", "instruction": "x", "mask": "mask.png"},
        {"file_name": "a.png", "instruction": "y", "mask": "all.png"},
        {"file_name": "a.png", "instruction": "z"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suite = PreservationSuite()
    items, broken = suite.items(tmp_path)
    assert len(items) == 2
    assert "no mask" in broken[0].reason
    reward = suite.reward(None).build()
    edited = numbered_image(100)
    edited.paste((0, 0, 0), (0, 0, 4, 8))  # inside the mask
    edited.paste((151, 100, 200), (4, 0, 6, 8))  # half of what should stay: 51 / 255 / 3 channels
    given = {name: column.item() for name, column in reward([Sample(suite.task_for(items[0]), edited)]).items()}
    found = suite.score(items[0], given)
    assert found["l1"] == pytest.approx(0.5 * 0.2 / 3, abs=1e-6)
    assert math.isnan(found["dino"])
    given = {name: column.item() for name, column in reward([Sample(suite.task_for(items[1]), edited)]).items()}
    assert "leaves nothing" in suite.score(items[1], given)
