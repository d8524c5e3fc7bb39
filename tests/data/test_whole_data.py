"""Evaluation on whole data sets and on test sets, which are recognised by name; tags and thoughts of published data."""

import json
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

import stream_files
from retouch.cli import main
from retouch.data.base import DataContext
from retouch.data.guard import find_test_sets, refuse_test_sets
from retouch.data.sources.folder import FolderData
from retouch.data.sources.hub import HubData
from retouch.data.sources.stream import StreamData
from retouch.inference.opening import whole_data
from retouch.recipe.recipe import parse
from retouch.types import Codes
from retouch_models.tokenizing import read_tasks
from small_runs import photos_recipe

ROWS = 5


def folder(root, name, **columns):
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


def evaluated(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    printed = capsys.readouterr().out
    result: dict[str, Any] = json.loads(printed[printed.index("{") :])
    return result


def test_fault_1_a_test_set_can_be_evaluated_but_not_trained_on(tmp_path, capsys):
    bench = folder(tmp_path, "gedit-bench")
    file = photos_recipe(tmp_path, bench)
    assert evaluated(capsys, str(file))["table"]["all"]["n"] == 1
    assert main(["train", str(file)]) == 2
    assert "not for training" in capsys.readouterr().err


def test_fault_2_a_whole_data_set_can_be_evaluated(tmp_path, capsys):
    own, other = folder(tmp_path, "own"), folder(tmp_path, "geneval-like")
    file = photos_recipe(tmp_path, own)
    assert evaluated(capsys, str(file), "--set", "data.held_out=all")["table"]["all"]["n"] == ROWS
    document = json.loads(file.read_text())
    limited = tmp_path / "limited.json"
    limited.write_text(json.dumps({**document, "data": {**document["data"], "held_out": "all"}, "eval": {"tasks": 2}}))
    assert evaluated(capsys, str(limited))["table"]["all"]["n"] == ROWS, "the key of training does not limit it"
    assert evaluated(capsys, str(limited), "--set", "eval.tasks=2")["table"]["all"]["n"] == 2
    assert evaluated(capsys, str(file), "--data", str(other))["table"]["all"]["n"] == ROWS
    assert main(["train", str(file), "--set", "data.held_out=all"]) == 2
    assert 'data.held_out: "all" leaves nothing to train on' in capsys.readouterr().err
    assert main(["eval", str(file), "--set", "data.held_out=0"]) == 2
    assert "'all'" in capsys.readouterr().err
    assert main(["eval", str(file), "--data", str(tmp_path / "nothing")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_fault_2_data_of_another_layout_can_be_evaluated(tmp_path, capsys):
    words = ["--data", str(folder(tmp_path, "own")), "--set", "eval.column=null"]
    words += ["--set", 'reward={"kind": "share", "channel": "red", "combine": {"share": 1.0}}']
    found = evaluated(capsys, "recipes/quickstart.jsonnet", *words)
    assert found["table"]["all"]["n"] == ROWS
    assert found["step"] == 0


def test_fault_2_a_run_on_a_stream_is_evaluated_on_a_whole_data_set(tmp_path, capsys):
    other = stream_files.parquet(tmp_path / "other", files=1, rows=ROWS)
    data = {"kind": "stream", "path": str(other), "columns": {"instruction": "instruction", "image": "image"}, "size": [24, 24]}
    document = json.loads(photos_recipe(tmp_path, folder(tmp_path, "own")).read_text())
    file = tmp_path / "stream.json"
    file.write_text(json.dumps({**document, "data": {**data, "held_out": 2}}))
    assert evaluated(capsys, str(file))["table"]["all"]["n"] == 2
    assert evaluated(capsys, str(file), "--data", str(other))["table"]["all"]["n"] == ROWS
    changed = parse(json.loads(file.read_text()), whole_data("org/name", StreamData(path=str(other), columns=data["columns"]))).data
    assert changed == HubData(path="org/name", columns=data["columns"], held_out="all")


def test_the_revision_in_the_recipe_is_not_used_for_other_data(tmp_path):
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


def test_fault_4_tag_columns_become_tags_and_rows_of_the_result_table(tmp_path, capsys):
    own = folder(tmp_path, "own", task_type=lambda row: ["colour", "style"][row % 2])
    file = photos_recipe(
        tmp_path, own, data={"tags": ["task_type"], "held_out": "all"}, eval={"headline": {"task_type": ["colour"]}}
    )
    table = evaluated(capsys, str(file))["table"]
    assert {row: table[row]["n"] for row in table} == {"all": 5, "headline": 3, "task_type=colour": 3, "task_type=style": 2}
    section = FolderData(path=str(folder(tmp_path, "untagged")), tags=("task_type",))
    with pytest.raises(ValueError, match="'task_type': no value for this tag"):
        section.build(DataContext())


THOUGHT = {"plan": "find the sky", "colour": "blue", "check": {"edges": "sharp"}}


@pytest.mark.parametrize(
    ("value", "keys", "expected"),
    [
        ("find the sky", (), "find the sky"), (THOUGHT, (), 'find the sky\nblue\n{"edges": "sharp"}'),
        (THOUGHT, ("colour", "plan"), "colour: blue\nplan: find the sky"),
        (json.dumps(THOUGHT), ("check",), 'check: {"edges": "sharp"}'), ("", (), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("column", ["thought", "thinking", "CoT"])
def test_fault_5_thoughts_are_read(tmp_path, column, value, keys, expected):
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
def test_fault_5_invalid_chains_of_thought_raise(tmp_path, value, keys, message):
    own = folder(tmp_path, "own", why=lambda row: value)
    with pytest.raises(ValueError, match=message):
        FolderData(path=str(own), columns={"thought": "why"}, thought_keys=keys, held_out=1).build(DataContext())


def test_a_whole_data_set_that_eval_tasks_limits_is_said(caplog, tmp_path):
    source = FolderData(path=str(folder(tmp_path, "limited")), held_out="all")
    context = DataContext(trains=False, eval_split="test", eval_tasks=ROWS - 1, size=(48, 48))
    assert len(source.build(context).heldout) == ROWS - 1
    assert f"limits the evaluation to {ROWS - 1} of {ROWS} rows; set eval.tasks to {ROWS}" in caplog.text
    caplog.clear()
    assert len(source.build(replace(context, eval_tasks=ROWS)).heldout) == ROWS
    assert "eval.tasks" not in caplog.text


TESTS = {
    "UCSC-VLAA/Complex-Edit": "Complex-Edit", "data/complex_edit/test_real": "Complex-Edit",
    "facebook/emu_edit_test_set": "Emu Edit test set", "facebook/emu_edit_test_set_generations": "Emu Edit test set",
    "geneval/prompts/evaluation_metadata.jsonl": "GenEval", "flow_grpo/dataset/geneval/test_metadata.jsonl": "GenEval",
    "prompts/geneval.jsonl": "GenEval", "djghosh13/geneval": "GenEval",
    "flow_grpo/dataset/ocr/test.txt": "Flow-GRPO's OCR test list", "prompts/ocr.txt": "Flow-GRPO's OCR test list",
    "flow_grpo/dataset/pickscore/test.txt": "Flow-GRPO's PickScore test list",
    "Calligrapher2025/Calligrapher_bench_testing": "Calligrapher's bench",
    "MagicBrush/test": "MagicBrush test",
    "sikarwarank/magicbrush_eval": "MagicBrush test", "benchmarks/magicbrush-test-00000.parquet": "MagicBrush test",
    "benchmarks/emuedit.parquet": "EARL's evaluation sets", "earl-datasets/omniedit/validation": "EARL's validation lists",
    "sikarwarank/i2bench_eval": "I2EBench", "sikarwarank/omniedit_eval": "EARL's evaluation sets",
    "sikarwarank/vismin-test.parquet": "EARL's evaluation sets", "McGill-NLP/AURORA-Bench": "AURORA-Bench",
    "TIGER-Lab/OmniEdit-Filtered-1.2M/dev": "OmniEdit's split dev", "Calligrapher2025/Calligrapher": "Calligrapher's bench",
    "X-Omni/LongText-Bench": "LongText-Bench", "CodeGoat24/UniGenBench": "UniGenBench",
    "data/HPDv2/benchmark/photo.json": "HPSv2's benchmark", "stepfun-ai/GEdit-Bench": "GEdit-Bench",
    "sysuyy/ImgEdit-Bench": "ImgEdit-Bench", "TIGER-Lab/OmniEdit-Bench": "OmniEdit-Bench",
    "EditScore/EditReward-Bench": "EditReward-Bench", "black-forest-labs/kontext-bench": "KontextBench",
    "nateraw/parti-prompts": "PartiPrompts", "T2I-CompBench/examples/dataset/color_val.txt": "T2I-CompBench",
    "GenEval2/geneval2_data.jsonl": "GenEval", "ImgEdit/Benchmark/Multiturn": "ImgEdit-Bench",
    "downloads/basic_edit.json": "ImgEdit-Bench", "downloads/UGE_edit.json": "ImgEdit-Bench",
    "mair-lab/escher-vismin-dev": "EARL's evaluation sets", "PhoenixZ/RISEBench": "RISEBench",
    "downloads/datav2_total_w_subtask.json": "RISEBench", "mercurystraw/Kris_Bench": "KRIS-Bench",
    "downloads/text_prompts_zh.jsonl": "LongText-Bench", "downloads/test_prompts_en_long.csv": "UniGenBench",
    "ELLA/dpg_bench/dpg_bench.csv": "DPG-Bench", "data/drawbench.csv": "DrawBench",
}  # fmt: skip
TRAINING = [
    "UCSC-VLAA/GPT-Image-Edit-1.5M", "GPT-Image-Edit-1.5M/gpt-edit/omniedit/complex-edit", "TIGER-Lab/OmniEdit-Filtered-1.2M",
    "earl-datasets/omniedit/train", "osunlp/MagicBrush", "McGill-NLP/AURORA", "omniedit/development.jsonl",
    "ymhao/HPDv2/train.json", "BleachNick/UltraEdit_500k", "timbrooks/instructpix2pix-clip-filtered", "EditScore/EditScore-RL-Data",
    "EditScore/EditScore-Reward-Data", "flow_grpo/dataset/geneval/train_metadata.jsonl", "flow_grpo/dataset/ocr/train.txt",
    "flow_grpo/dataset/pickscore/train.txt", "T2I-CompBench/examples/dataset/color_train.txt", "sysuyy/ImgEdit",
    "ImgEdit/Multiturn/content_memory.json", "prompts/train_prompts_en.csv", "photos/my contest", "workbench.txt",
]  # fmt: skip


def test_test_sets_are_recognised_by_name_split_and_link_and_training_sets_are_not(tmp_path):
    def names(*places, **keys):
        return [known.name for known in find_test_sets(places, **keys)]

    for place, name in TESTS.items():
        assert [names(change(place)) for change in (str, str.upper, str.lower)] == [[name]] * 3
    assert {place: names(place, split="train") for place in TRAINING} == {place: [] for place in TRAINING}
    assert "MagicBrush test" in names("osunlp/MagicBrush", split="test")
    assert names("me/mine", split="test_real") == ["the split 'test_real'"]
    assert names("osunlp/MagicBrush", split="dev") == []
    (tmp_path / "GEdit-Bench").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "GEdit-Bench")
    assert names(tmp_path / "mine") == ["GEdit-Bench"]


def test_calligraphers_bench_is_recognised_by_its_files_and_not_by_the_name_of_one(tmp_path):
    folder = tmp_path / "items"
    folder.mkdir()
    (folder / "list.txt").write_text("11-Azir\n")
    (folder / "test11_source.png").touch()
    assert find_test_sets([folder, folder / "list.txt", "mine/self_bench.txt"]) == ()
    for number in range(100):
        (folder / f"test{number}_source.png").touch()
    assert [known.place for known in find_test_sets([folder, folder / "list.txt"])] == [str(folder), str(folder / "list.txt")]


def test_test_sets_raise_without_allow_test_sets_and_are_recorded_with_it():
    with pytest.raises(
        ValueError, match=r"prompts/ocr\.txt is Flow-GRPO's OCR test list; x/GEdit-Bench is .*data\.allow_test_sets: true"
    ):
        refuse_test_sets(["prompts/ocr.txt", "photos", "x/GEdit-Bench"], allow_test_sets=False)
    with pytest.raises(ValueError, match=r"not for training: GEdit-Bench\. Use other data"):
        refuse_test_sets(["GEdit-Bench"], allow_test_sets=False)
    recorded = refuse_test_sets(["prompts/ocr.txt", "photos"], allow_test_sets=True)
    assert [(known.name, known.place) for known in recorded] == [("Flow-GRPO's OCR test list", "prompts/ocr.txt")]
    assert refuse_test_sets(["photos"], split="train", allow_test_sets=False) == ()
