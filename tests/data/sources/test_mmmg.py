"""A small copy of MMMG's training set is converted to prompt lists from easy to hard, which are read with their graphs."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from retouch.cli import main
from retouch.data.guard import find_test_sets
from retouch.data.sources.mmmg import DIFFICULTY, TRAIN, write_curriculum
from retouch.data.sources.prompts import read_prompts
from retouch.recipe.recipe import load
from retouch.rewards.judges.mmmg import KnowledgeGraph
from retouch.run.build import sets_of

LEVELS = {"0_preschool": ("Math", "Biology"), "1_primaryschool": ("Math",), "5_PhD": ("Math", "History")}


def row(level: str, discipline: str, number: int) -> dict[str, object]:
    graph = {"elements": ["sun", "water"], "dependencies": ["Causes(sun, water)"]}
    return {
        "question": f"Explain {discipline} {number} for {level}",
        "key": f"{level}_{discipline}_{number}",
        "Visual Components": graph,
        "Key Knowledge": {"sun": "it shines"},
    }


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    found = {
        level: {name: [row(level, name, k) for k in range(3)] for name in disciplines} for level, disciplines in LEVELS.items()
    }
    found["5_PhD"]["History"] += [{"question": "no key"}, {"key": "no question"}]
    folder = tmp_path / "MMMG_Train"
    folder.mkdir()
    (folder / TRAIN).write_text(json.dumps(found))
    return folder


def pairs(file: Path) -> set[tuple[str, str]]:
    rows = read_prompts(file, tag_keys=("level", "discipline"))
    return {(rows[k].tags["level"], rows[k].tags["discipline"]) for k in range(len(rows))}


def test_stages_are_cumulative_and_ordered_by_level(downloaded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lists"
    assert main(["data", "convert", "mmmg", str(downloaded), "--out", str(out), "--stages", "3"]) == 0
    assert "15 prompts in 3 stages" in capsys.readouterr().out
    stages = [pairs(out / f"stage-{k}.jsonl") for k in (1, 2, 3)]
    assert stages[0] == {("preschool", "Math"), ("preschool", "Biology")}
    assert stages[1] == stages[0] | {("primaryschool", "Math"), ("PhD", "Math")}
    assert stages[2] == stages[1] | {("PhD", "History")}
    rows = read_prompts(out / "stage-3.jsonl")
    assert (len(rows), rows[0].id, rows[0].instruction) == (15, "0_preschool_Math_0", "Explain Math 0 for 0_preschool")
    assert rows[0].meta["Visual Components"] == row("0_preschool", "Math", 0)["Visual Components"]


def test_a_file_of_difficulties_orders_the_stages(downloaded: Path, tmp_path: Path) -> None:
    """The file of difficulties has the format of system A's repository."""
    easiest = [("5_PhD", "History", 0.9), ("0_preschool", "Biology", 0.5)]
    tuples = [{"level": level, "discipline": name, "difficulty_score": score} for level, name, score in easiest]
    (downloaded / DIFFICULTY).write_text(json.dumps({"total_tuples": 2, "tuples": tuples}))
    files = write_curriculum(downloaded, out=tmp_path / "lists", stages=5).files
    grown = [pairs(file) for file in files]
    assert grown[0] == {("PhD", "History")}
    assert grown[1] == grown[0] | {("preschool", "Biology")}
    assert grown[2] == grown[1] | {("preschool", "Math")}


def test_invalid_stages_outputs_and_files_raise(downloaded: Path, tmp_path: Path) -> None:
    for stages in (0, 6):
        with pytest.raises(ValueError, match="from 1 to 5"):
            write_curriculum(downloaded, out=tmp_path / "lists", stages=stages)
    write_curriculum(downloaded, out=tmp_path / "lists", stages=1)
    with pytest.raises(ValueError, match=r"stage-1\.jsonl exists"):
        write_curriculum(downloaded, out=tmp_path / "lists", stages=1)
    for content, why in (("[", "not valid JSON"), ("[]", "JSON object"), ('{"a": 1}', "map disciplines"), ("{}", "no row with")):
        (downloaded / TRAIN).write_text(content)
        with pytest.raises(ValueError, match=why):
            write_curriculum(downloaded, out=tmp_path / "other")
    with pytest.raises(ValueError, match="download MMMGBench/MMMG_Train"):
        write_curriculum(tmp_path, out=tmp_path / "other")


def test_mmmg_is_recognised_as_a_test_set_and_mmmg_train_is_not() -> None:
    assert [found.name for found in find_test_sets(["MMMGBench/MMMG"])] == ["MMMG"]
    assert find_test_sets(["MMMGBench/MMMG_Train", "data/MMMG_Train/train.json"]) == ()


def test_the_shipped_curriculum_reads_the_converted_lists(
    downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each phase of the recipe trains on the prompts of the previous phase and on harder ones, and no held-out prompt is trained
    on."""
    monkeypatch.chdir(tmp_path)
    write_curriculum(downloaded, out="lists")
    recipe = load("qwen-image/writer-grpo-published-mmmg", [f"phases.{number}.data.held_out=0.3" for number in range(5)])
    sets = sets_of(recipe, recipe.resolved_phases(), size=None)
    trained = [{task.id for task in each.train} for each in sets]
    assert all(before < after for before, after in pairwise(trained))
    heldout = {task.id for task in sets[0].heldout}
    assert heldout
    assert not heldout & trained[-1]
    assert {tuple(task.tags) for each in sets for task in each.train} == {("level", "discipline")}
    assert KnowledgeGraph.of(sets[-1].train[-1]).elements == ("sun", "water")
