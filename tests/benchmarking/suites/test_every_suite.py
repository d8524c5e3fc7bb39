"""Every suite, from one table: its published formula by hand, and missing or broken items are reported and never score 0."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import suite_rows
from canned_judge import JUDGE, number_of, numbered_image
from retouch.cli import main
from retouch.config import consent
from retouch.rewards.base import RewardSection
from retouch.rewards.pixels import ShareReward
from retouch_bench.images import ImageFolder, image_keys
from retouch_bench.kinds import SUITES, find_suite
from retouch_bench.running import run
from retouch_bench.suite import Suite
from slow_params import slow_after

NAN = math.nan
VIE = ({"sc": 4.0, "pq": 9.0, "overall": 6.0}, {"sc": 1.0, "pq": 4.0, "overall": 2.0})


@dataclass(frozen=True)
class Case:
    """``write``: makes the data, two items and rows that cannot be used. ``given``: what the suite's reward returns for the images
    of the two. ``expected``: the headline by the published formula, computed by hand, for both items and for the first alone.
    ``broken``: a word of the reason of each row that cannot be used. ``golden``: the test that also computes the scores by hand."""

    golden: str
    write: Callable[[Path], Path] | None
    given: tuple[Mapping[str, float], Mapping[str, float]]
    expected: tuple[float, float]
    broken: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


TURN = "test_editing_suites.test_each_imgedit_turn_edits_the_image_of_the_previous_turn"
CASES = {
    "playground": Case(
        "test_running.test_a_folder_of_images_has_the_scores_of_the_model_that_made_them",
        None,  # its tasks are generated
        tuple({"IF": score, "IP": score, "PQ": score, "overall": score, "exact": 0.0} for score in (8.0, 3.0)),
        (5.5, 8.0),
        (),
        {"tasks": 2},
    ),
    # the mean of the groups' means
    "gedit": Case(
        "test_editing_suites.test_gedit_averages_task_types_and_selects_one_language", suite_rows.gedit, VIE, (4, 6),
        ("instruction",),
    ),
    "imgedit": Case(
        "test_editing_suites.test_imgedit_averages_types", suite_rows.imgedit,
        ({"compliance": 4, "naturalness": 4, "integrity": 2}, {"compliance": 5, "naturalness": 4, "integrity": 3}),
        ((10 / 3 + 4) / 2, 10 / 3), ("melt",),
    ),
    "imgedit-uge": Case(
        "test_editing_suites.test_imgedit_hard_is_a_mean", suite_rows.imgedit_uge, ({"score": 2}, {"score": 5}), (3.5, 2),
        ("'prompt'", "gone.png"),
    ),
    "imgedit-multi-turn": Case(TURN, suite_rows.imgedit_turns, tuple({**one, "restraint": 5.0} for one in VIE), (4, 6), ("turn2",)),
    "multi-turn": Case(
        "test_suites_run.test_the_table_of_multi_turn_has_reward_and_preservation_of_each_turn",
        suite_rows.turns,
        tuple(
            {"pixels/preservation": 0.5, **{f"vie/{name}": score for name, score in {**one, "restraint": 5.0}.items()}}
            for one in VIE
        ),
        (4, 6),
        ("later",),
    ),
    "complex-edit": Case(
        "test_editing_suites.test_complex_edit_averages_levels",
        suite_rows.complex_edit,
        tuple(
            {"instruction_following": f, "identity_preservation": 6.0, "perceptual_quality": 3.0, "overall": (f + 6 + 3) / 3}
            for f in (9.0, 6.0)
        ),
        (5.5, 6),
        ("PNG", "PNG"),  # the damaged image, at both levels
        {"levels": "1-2"},
    ),
    "earl": Case(
        "test_editing_suites.test_earl_averages_six_sets", suite_rows.earl, VIE, (4, 6), ("no source image",),
        {"sets": ("aurora", "magicbrush")},
    ),
    "preservation": Case(
        "test_editing_suites.test_preservation_is_measured_outside_the_mask", suite_rows.preservation,
        ({"pixels/preservation": 0.9}, {"pixels/preservation": 0.7}), (0.2, 0.1), ("no mask",),
    ),
    "kris": Case(
        "test_reasoning_suites.test_kris_score_is_the_mean_of_the_columns_of_its_category",
        suite_rows.kris,
        # biology has knowledge, the change of a colour has not
        (
            {"consistency": 4, "instruction": 5, "quality": 3, "knowledge": 2},
            {"consistency": 4, "instruction": 5, "quality": 3, "knowledge": NAN},
        ),
        ((14 / 4 + 12 / 3) / 2, 14 / 4),
        ("gone.png",),
    ),
    "rise": Case(
        "test_reasoning_suites.test_rise_weighs_its_scores_as_published", suite_rows.rise,
        ({"reasoning_score": 5, "consistency": 5, "quality": 5}, {"reasoning_score": 5, "consistency": 4, "quality": 5}),
        (1 / 2, 1), ("correct result",),
    ),
    "geneval": Case(
        "test_text_to_image_suites.test_geneval_is_the_mean_of_its_tasks", suite_rows.geneval,
        ({"correct": 1, "met": 1}, {"correct": 0, "met": 0.5}), (1 / 2, 1), ("painting",),
    ),
    "negation": Case(
        "test_text_to_image_suites.test_negation_has_one_share_for_each_number_of_positive_and_negated_statements",
        suite_rows.negation, ({"correct": 1, "met": 1}, {"correct": 0, "met": 0.5}), (1 / 2, 1), ("color or a position",),
    ),
    "geneval2": Case(
        "test_text_to_image_suites.test_geneval2_takes_the_geometric_mean", suite_rows.geneval2,
        ({"gm": 0.6, "am": 0.65}, {"gm": 0.2, "am": 0.3}), (0.4, 0.6), ("atom_count",),
    ),
    "dpg": Case(
        "test_text_to_image_suites.test_dpg_questions_that_depend_on_a_negative_answer_score_0",
        suite_rows.dpg,
        tuple(
            {"score": score, "entity": score, **dict.fromkeys(("global", "attribute", "relation", "other"), NAN)}
            for score in (0.25, 1.0)
        ),
        (0.625, 0.25),
        ("no question 7",),
    ),
    "unigenbench": Case(
        "test_text_to_image_suites.test_unigenbench_pools_the_points_of_each_dimension",
        suite_rows.unigenbench,
        ({"overall": 2 / 3, "style": 1, "attribute": 1 / 2}, {"overall": 0, "style": NAN, "attribute": 0}),
        ((1 + 1 / 3) / 2, (1 + 1 / 2) / 2),  # style 1 of 1 point; attribute 1 of 3, and 1 of 2
        ("Smell",),
    ),
    "ocr": Case(
        "test_text_to_image_suites.test_ocr_is_a_mean_over_prompts", suite_rows.ocr,
        ({"accuracy": 1, "exact": 1, "words": 1}, {"accuracy": 2 / 3, "exact": 0.5, "words": 0}), (5 / 6, 1),
        ("double quotes",),
    ),
    "longtext": Case(
        "test_text_to_image_suites.test_longtext_pools_words",
        suite_rows.longtext,
        tuple({"accuracy": 0.0, "exact": 0.0, "words": share} for share in (3 / 4, 0.0)),
        (3 / 5, 3 / 4),  # 3 of 4 words, and 0 of 1
        ("'text'",),
    ),
}  # fmt: skip


def test_every_suite_has_a_case_and_its_golden_test_exists():
    assert set(CASES) == set(SUITES) - {consent.IMPORT, "prompts", "edits"}  # those two have no published formula
    for case in CASES.values():
        file, _, name = case.golden.partition(".")
        (path,) = Path(__file__).parents[1].rglob(f"{file}.py")
        assert f"\ndef {name}(" in path.read_text()


@pytest.mark.parametrize(("name", "data"), [("prompts", "own.jsonl"), ("edits", ".")])
def test_own_data_are_scored_by_a_reward_of_ones_own(name, data, tmp_path, capsys, monkeypatch):
    for number in (1, 2):
        numbered_image(number).save(tmp_path / f"own-{number}.png")
    rows = [{"id": f"own-{n}", "file_name": f"own-{n}.png", "instruction": f"{n} cats", "category": f"c{n}"} for n in (1, 2)]
    (tmp_path / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({k: r[k] for k in r if k != "file_name"}) + "\n" for r in rows))
    words = ["bench", name, "--data", str(tmp_path / data), "--images", str(tmp_path), "--device", "cpu"]
    assert main(words) == 2
    assert "is scored by a reward that you choose: name it with --judge" in capsys.readouterr().err
    assert main([*words, "--judge", "share:green", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"**My {name}**, images in {tmp_path}, scored by share; 2 items, seed 0." in printed
    assert "| c2 | 1 | 0.331 |" in printed
    (tmp_path / "own_rewards.py").write_text("def width(images, **kwargs):\n    return [image.width for image in images]\n")
    monkeypatch.syspath_prepend(tmp_path)

    def width(images, **columns):
        return [float(image.width) for image in images]

    for place, form in enumerate(("own_rewards:width", "own_rewards.py:width", width)):
        given = {"data": tmp_path / data, "images": tmp_path, "out": tmp_path / f"out{place}", "device": "cpu"}
        found = run(name, judge=form, **given)
        assert (found.headline, found.about["headline"]) == (numbered_image(1).width, "width")


def test_another_count_of_items_never_carries_the_published_title(tmp_path):
    data = suite_rows.ocr(tmp_path)
    (tmp_path / "images").mkdir()
    items, _ = find_suite("ocr").items(data)
    for number, item in enumerate(items):
        numbered_image(number + 1).save(tmp_path / "images" / f"{item.id}.png")
    options = {"judge": ShareReward(channel="green"), "data": data, "images": tmp_path / "images", "out": tmp_path / "out"}
    other = run("ocr", **options)
    assert other.about["title"] == "OCR accuracy (Flow-GRPO)'s protocol on other data (3 items; 1,018 are published)"
    part = run("ocr", subset=1, **options)
    assert "scored by share; 1 of 2 items, seed 0." in str(part)


def with_reward(suite, table):
    """The suite with a reward that returns ``table``'s row of the image's number."""
    names = list(table[1])
    real = suite.reward(JUDGE).known_columns()
    assert real is not None
    assert set(names) <= set(real)
    made = dict(real)

    class Canned(RewardSection):
        columns = made

        def __call__(self, samples):
            numbers = [number_of(sample.image) for sample in samples if sample.image is not None]
            return {name: torch.tensor([table[number].get(name, NAN) for number in numbers]) for name in made}

    class WithReward(type(suite)):
        def reward(self, judge):
            return Canned()

    changed: Suite = WithReward(**suite.model_dump())
    return changed


@pytest.mark.parametrize("name", slow_after(6, CASES))
def test_missing_and_broken_items_are_reported_and_excluded_from_the_headline(name, tmp_path):
    case = CASES[name]
    (tmp_path / "data").mkdir()
    data = None if case.write is None else case.write(tmp_path / "data")
    plain = find_suite(name, case.options)
    items, broken = plain.items(data)
    assert len(items) == 2
    assert [(bool(each.id), word in each.reason) for each, word in zip(broken, case.broken, strict=True)] == [
        (True, True) for _ in case.broken
    ]
    folder = ImageFolder(tmp_path / "images", suite=plain)
    places = image_keys(list(enumerate(items)), suite=plain)
    for place in places:
        folder.write(place, numbered_image(place.number + 1))
    first, second = case.given
    unread = dict.fromkeys(second, NAN)
    more: dict[str, Any] = {"data": data, "images": folder.root}
    whole = run(with_reward(plain, {1: first, 2: second}), out=tmp_path / "whole", **more)
    without_answer = run(with_reward(plain, {1: first, 2: unread}), out=tmp_path / "answers", **more)
    judged = {**more, "images": tmp_path / "kept"}
    shutil.copytree(folder.root, tmp_path / "kept")
    lost = [place for place in places if place.number == 1]
    for place in lost:
        folder.path(place).unlink()
    without_image = run(with_reward(plain, {1: first, 2: second}), out=tmp_path / "files", **more)
    assert whole.headline == pytest.approx(case.expected[0])
    assert not whole.missing
    green = run(plain, judge=ShareReward(channel="green"), out=tmp_path / "green", **judged)
    assert not green.missing
    assert green.table["all"].keys() == {"share"}
    assert green.headline == pytest.approx((100 / 301 + 100 / 302) / 2), "another reward can score every suite"
    for partial in (without_answer, without_image):
        assert partial.headline == pytest.approx(case.expected[1])
        assert [each["item"] for each in partial.missing] == [items[1].id] * len(lost)
        assert all(each["reason"] for each in partial.missing)
        assert partial.table["all"][plain.headline_column]["n"] == 1
        assert f"{len(lost)} image{'s' * (len(lost) > 1)} without a score, left out: {items[1].id}" in str(partial)
        assert len(partial.about["broken"]) == len(case.broken)
        if case.broken:
            what = f"{len(case.broken)} item{'s' * (len(case.broken) > 1)} of the data that cannot be used"
            assert f"{what}, left out: {broken[0].id} ({broken[0].reason})" in str(partial)
