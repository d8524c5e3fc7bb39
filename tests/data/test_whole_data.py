"""Evaluation on whole data sets and on test sets; tags and chains of thought, which published data sets contain."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import stream_files
from retouch.cli import main
from retouch.data.base import DataContext
from retouch.data.guard import find_test_sets
from retouch.data.sources.folder import FolderData
from retouch.data.sources.hub import HubData
from retouch.data.sources.stream import StreamData
from retouch.inference.evaluation import whole_data
from retouch.inference.tokenizing import read_tasks
from retouch.recipe.recipe import parse
from retouch.run.build import build_sets
from retouch.types import Codes
from small_runs import photos_recipe

ROWS = 5


def folder(root: Path, name: str, **columns: Any) -> Path:
    """A data set of five photographs. ``columns``: further ones, each a function of the row's number."""
    made = root / name
    made.mkdir()
    for row in range(ROWS):
        Image.new("RGB", (24, 24), (40 * row, 100, 50)).save(made / f"{row}.png")
    lines = [
        {"file_name": f"{row}.png", "instruction": f"make it redder {row}", **{key: of(row) for key, of in columns.items()}}
        for row in range(ROWS)
    ]
    (made / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    printed = capsys.readouterr().out
    result: dict[str, Any] = json.loads(printed[printed.index("{") :])
    return result


def test_fault_1_a_test_set_can_be_evaluated_but_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = folder(tmp_path, "gedit-bench")
    file = photos_recipe(tmp_path, bench)
    assert evaluated(capsys, str(file))["table"]["all"]["n"] == 1
    assert main(["train", str(file)]) == 2
    assert "not for training" in capsys.readouterr().err


def test_fault_2_a_whole_data_set_can_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, other = folder(tmp_path, "own"), folder(tmp_path, "geneval-like")
    file = photos_recipe(tmp_path, own)
    assert evaluated(capsys, str(file), "--set", "data.held_out=all")["table"]["all"]["n"] == ROWS
    few = ["--set", "data.held_out=all", "--set", "eval.tasks=2"]
    assert evaluated(capsys, str(file), *few)["table"]["all"]["n"] == 2
    document = json.loads(file.read_text())
    limited = tmp_path / "limited.json"
    limited.write_text(json.dumps({**document, "data": {**document["data"], "held_out": "all"}, "eval": {"tasks": 2}}))
    assert evaluated(capsys, str(limited))["table"]["all"]["n"] == ROWS
    assert evaluated(capsys, str(file), "--data", str(other))["table"]["all"]["n"] == ROWS
    assert main(["train", str(file), "--set", "data.held_out=all"]) == 2
    assert 'data.held_out: "all" leaves nothing to train on' in capsys.readouterr().err
    for nothing in ("0", "1.0", str(ROWS)):
        assert main(["eval", str(file), "--set", f"data.held_out={nothing}"]) == 2
        assert "'all'" in capsys.readouterr().err
    assert main(["eval", str(file), "--data", str(tmp_path / "nothing")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_fault_2_data_of_another_layout_can_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(
        capsys,
        "recipes/quickstart.jsonnet",
        "--data",
        str(folder(tmp_path, "own")),
        "--set",
        'reward={"kind": "share", "channel": "red", "combine": {"share": 1.0}}',
        "--set",
        "eval.column=null",
    )
    assert found["table"]["all"]["n"] == ROWS
    assert found["step"] == 0


def test_fault_2_a_run_on_a_stream_is_evaluated_on_a_whole_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = stream_files.parquet(tmp_path / "other", files=1, rows=ROWS)
    data = {"kind": "stream", "path": str(other), "columns": {"instruction": "instruction", "image": "image"}, "size": [24, 24]}
    document = json.loads(photos_recipe(tmp_path, folder(tmp_path, "own")).read_text())
    file = tmp_path / "stream.json"
    file.write_text(json.dumps({**document, "data": {**data, "held_out": 2}}))
    assert evaluated(capsys, str(file))["table"]["all"]["n"] == 2
    assert evaluated(capsys, str(file), "--data", str(other))["table"]["all"]["n"] == ROWS
    changed = parse(json.loads(file.read_text()), whole_data("org/name", StreamData(path=str(other), columns=data["columns"]))).data
    assert changed == HubData(path="org/name", columns=data["columns"], held_out="all")


def test_the_revision_in_the_recipe_is_not_used_for_other_data(tmp_path: Path) -> None:
    other = stream_files.parquet(tmp_path / "other", files=1, rows=ROWS)
    columns = {"instruction": "instruction", "image": "image"}
    document = json.loads(photos_recipe(tmp_path, folder(tmp_path, "own")).read_text())
    for section in (
        HubData(path="org/own", revision="abc", columns=columns),
        StreamData(path="org/own", revision="abc", columns=columns),
    ):
        given = {**document, "data": section.model_dump(mode="json")}
        changed = parse(given, whole_data(str(other), section)).data
        assert isinstance(changed, HubData)
        assert len(changed.rows(seed=0)) == ROWS
        again = parse(given, whole_data("org/own", section)).data
        assert isinstance(again, HubData)
        assert again.revision == "abc"


@pytest.mark.parametrize(
    ("place", "split", "name"),
    [
        ("sikarwarank/magicbrush_eval", None, "MagicBrush test"),
        ("benchmarks/magicbrush-test-00000.parquet", None, "MagicBrush test"),
        ("sikarwarank/i2bench_eval", None, "I2EBench"),
        ("McGill-NLP/AURORA-Bench", None, "AURORA-Bench"),
        ("TIGER-Lab/OmniEdit-Filtered-1.2M", "dev", "OmniEdit's split dev"),
        ("Calligrapher2025/Calligrapher", None, "Calligrapher's bench"),
    ],
)
def test_fault_3_data_sets_of_published_evaluations_are_refused_for_training(place: str, split: str | None, name: str) -> None:
    assert [known.name for known in find_test_sets([place], split=split)] == [name]
    section = HubData(path=place, split=split or "train", columns={"instruction": "instruction", "image": "image"})
    with pytest.raises(ValueError, match=f"not for training: {re.escape(place)} is {name}"):
        section.build(DataContext())


def test_fault_3_the_split_dev_of_omniedit_is_a_test_set() -> None:
    assert [str(known) for known in find_test_sets(["TIGER-Lab/OmniEdit-Filtered-1.2M"], split="dev")] == [
        "TIGER-Lab/OmniEdit-Filtered-1.2M is OmniEdit's split dev"
    ]
    assert find_test_sets(["TIGER-Lab/OmniEdit-Filtered-1.2M"], split="train") == ()


def test_fault_4_tag_columns_become_tags_and_rows_of_the_result_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = folder(tmp_path, "own", task_type=lambda row: ["colour", "style"][row % 2])
    file = photos_recipe(
        tmp_path, own, data={"tags": ["task_type"], "held_out": "all"}, eval={"headline": {"task_type": ["colour"]}}
    )
    table = evaluated(capsys, str(file))["table"]
    assert {row: table[row]["n"] for row in table} == {"all": 5, "headline": 3, "task_type=colour": 3, "task_type=style": 2}


def test_fault_4_a_row_without_a_value_for_a_tag_raises(tmp_path: Path) -> None:
    section = FolderData(path=str(folder(tmp_path, "own")), tags=("task_type",))
    with pytest.raises(ValueError, match="'task_type': no value for this tag"):
        section.build(DataContext())


def test_fault_4_a_hub_data_set_has_tags(tmp_path: Path) -> None:
    import datasets

    rows = [{"instruction": "redder", "kind": "colour"}, {"instruction": "bluer", "kind": "style"}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "hub"))
    section = HubData(path=str(tmp_path / "hub"), columns={}, tags=("kind",), held_out="all")
    assert [dict(task.tags) for task in section.build(DataContext(trains=False)).heldout] == [{"kind": "colour"}, {"kind": "style"}]


THOUGHT = {"plan": "find the sky", "colour": "blue", "check": {"edges": "sharp"}}


@pytest.mark.parametrize(
    ("value", "keys", "expected"),
    [
        ("find the sky", (), "find the sky"),
        (THOUGHT, (), 'find the sky\nblue\n{"edges": "sharp"}'),
        (THOUGHT, ("colour", "plan"), "colour: blue\nplan: find the sky"),
        (json.dumps(THOUGHT), ("check",), 'check: {"edges": "sharp"}'),
        ("", (), None),
    ],
)
@pytest.mark.parametrize("column", ["thought", "thinking", "CoT"])
def test_fault_5_thoughts_are_read(tmp_path: Path, column: str, value: Any, keys: tuple[str, ...], expected: str | None) -> None:
    own = folder(tmp_path, "own", **{column: lambda row: value})
    for task in FolderData(path=str(own), thought_keys=keys, held_out=1).build(DataContext()).train:
        assert task.meta.get(Codes.THOUGHT) == expected
    section = {"kind": "folder", "path": str(own), "thought_keys": list(keys)}
    assert [task.meta.get(Codes.THOUGHT) for task in read_tasks(json.dumps(section), size=(24, 24))] == [expected] * ROWS


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        (THOUGHT, ("colour", "mood"), "'why': has no 'mood', which thought_keys names; it has plan, colour, check"),
        ("{broken", ("plan",), "'why': should be a map with plan, and is not JSON"),
        (7, (), "'why': should be text or a map of texts, not 7"),
    ],
)
def test_fault_5_invalid_chains_of_thought_raise(tmp_path: Path, value: Any, keys: tuple[str, ...], message: str) -> None:
    own = folder(tmp_path, "own", why=lambda row: value)
    with pytest.raises(ValueError, match=message):
        FolderData(path=str(own), columns={"thought": "why"}, thought_keys=keys, held_out=1).build(DataContext())


def test_default_tags_and_thought_keys_are_not_written_into_the_recipe(tmp_path: Path) -> None:
    document = parse(json.loads(photos_recipe(tmp_path, folder(tmp_path, "own")).read_text())).document()
    assert not {"tags", "thought_keys"} & document["data"].keys()
    recipe = parse(document, ["data.held_out=all"])
    with pytest.raises(ValueError, match='"all" leaves nothing'):
        build_sets(recipe, recipe.data, size=None)


def test_a_whole_data_set_that_eval_tasks_limits_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    source = FolderData(path=str(folder(tmp_path, "limited")), held_out="all")
    context = DataContext(trains=False, eval_split="test", eval_tasks=ROWS - 1, size=(48, 48))
    assert len(source.build(context).heldout) == ROWS - 1
    assert f"limits the evaluation to {ROWS - 1} of {ROWS} rows; set eval.tasks to {ROWS}" in caplog.text
    caplog.clear()
    assert len(source.build(replace(context, eval_tasks=ROWS)).heldout) == ROWS
    assert "eval.tasks" not in caplog.text
