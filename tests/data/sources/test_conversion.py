"""Small copies of published data sets are converted to folders and prompt lists, which training can read."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from pictures import encoded
from retouch.cli import main
from retouch.data.sources.conversion import DIFFICULTY, TRAIN, convert, write_curriculum
from retouch.data.sources.folder import read_folder, read_prompts
from retouch.data.tasks import Tasks
from retouch.recipe.recipe import load
from retouch.run.build import sets_of
from retouch_judge.rewards import KnowledgeGraph

RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour):
    return encoded(Image.new("RGB", (8, 6), colour))


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def gpt_image_edit(folder):
    for task, kind in (("omniedit/addition", "rewrite"), ("omniedit/complex-edit", "complex")):
        put(folder / "gpt-edit" / task / "input" / "1.png", png(RED))
        put(folder / "gpt-edit" / task / "output" / "1.png", png(BLUE))
        name = Path(task).name
        row = {"id": f"omniedit_{name}_1", "dataset_source": "omniedit", "task": name, "instruction_type": kind}
        row |= {
            "input": "input/1.png", "output": "output/1.png", "instruction": f"{name}: make it blue", "input_description": "red",
        }  # fmt: skip
        absent = {**row, "id": f"omniedit_{name}_2", "output": "output/2.png"}
        put(folder / "gpt-edit" / task / "metadata" / f"omniedit_{name}.json", [row, absent])


def aurora(folder):
    for name in ("ag", "kubric"):
        put(folder / "data" / name / "images" / "1_left.png", png(RED))
        put(folder / "data" / name / "images" / "1_right.png", png(BLUE))
        row = {
            "instruction": "make it blue", "input": f"data/{name}/images/1_left.png", "output": f"data/{name}/images/1_right.png",
        }  # fmt: skip
        put(folder / "data" / name / "train.json", [row])


def parquet(folder, split, rows):
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")


def cell(colour):
    return {"bytes": png(colour), "path": None}


def omniedit(folder):
    row = {"omni_edit_id": "task_add/1", "task": "addition", "edited_prompt_list": ["make it blue", "turn it all blue"]}
    parquet(folder, "train", [{**row, "src_img": cell(RED), "edited_img": cell(BLUE), "width": 8}])


def magicbrush(folder):
    rows = [{"img_id": "77", "turn_index": turn, "instruction": "make it blue"} for turn in (1, 2)]
    images = {"source_img": cell(RED), "mask_img": cell(RED), "target_img": cell(BLUE)}
    parquet(folder, "train", [{**row, **images} for row in rows])


MADE = {
    "gpt-image-edit": (gpt_image_edit, [{"task": "addition"}, {"task": "complex-edit"}]),
    "aurora": (aurora, [{"data_set": "ag"}, {"data_set": "kubric"}]),
    "omniedit": (omniedit, [{"task": "addition"}]),
    "magicbrush": (magicbrush, [{"turn": "1"}, {"turn": "2"}]),
}


@pytest.mark.parametrize("name", MADE)
def test_a_converted_data_set_is_read_as_tasks(name, tmp_path, capsys):
    make, tags = MADE[name]
    make(tmp_path / "downloaded")
    inside = name in ("gpt-image-edit", "aurora")
    out = tmp_path / ("downloaded" if inside else "made")
    where = [] if inside else ["--out", str(out)]
    assert main(["data", "convert", name, str(tmp_path / "downloaded"), *where]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(tags)} edits")
    assert f"kind: 'folder', path: '{out}'" in said
    assert ("2 left out, because an image is missing" in said) == (name == "gpt-image-edit")
    tasks = Tasks(read_folder(out, tag_keys=tuple(tags[0])), resize=None)
    assert [dict(tasks[k].tags) for k in range(len(tasks))] == tags
    for k in range(len(tasks)):
        assert tasks[k].instruction.endswith("make it blue")
        assert tasks[k].images[0].getpixel((0, 0)) == RED
        assert tasks[k].target is not None
        assert tasks[k].target.getpixel((0, 0)) == BLUE
    assert main(["data", "check", str(out)]) == 0


def test_invalid_inputs_and_options_of_convert_raise(tmp_path):
    omniedit(tmp_path / "downloaded")
    magicbrush(tmp_path / "brush")
    parquet(tmp_path / "brush", "test", [{"img_id": "1"}])
    parquet(tmp_path / "brush", "dev", [{"img_id": "1"}])
    aurora(tmp_path / "aurora")
    put(tmp_path / "broken" / "x" / "metadata" / "a.json", [{"input": "a.png"}])
    cases = [
        ("omniedit", "downloaded", {"out": tmp_path / "a", "split": "dev"}, "these are test sets"),
        ("magicbrush", "brush", {"out": tmp_path / "b", "split": "test"}, "these are test sets"),
        ("magicbrush", "brush", {"out": tmp_path / "c", "split": "dev"}, "no column 'turn_index'"),
        ("magicbrush", "aurora", {"out": tmp_path / "d"}, "no train-"),
        ("aurora", "aurora", {"out": tmp_path / "e"}, "leave out --out"),
        ("omniedit", "downloaded", {}, "with --out"),
        ("gpt-image-edit", "aurora", {}, "no edit of gpt-image-edit has both images"),
        ("gpt-image-edit", "broken", {}, "should be a list of edits with id"),
        ("gpt-image-edit", "nowhere", {}, "download the data set first"),
        ("ultraedit", "downloaded", {}, "the known data sets are gpt-image-edit"),
    ]
    for name, folder, options, why in cases:
        with pytest.raises(ValueError, match=why):
            convert(name, tmp_path / folder, **options)
    assert not (tmp_path / "aurora" / "metadata.jsonl").exists()
    convert("aurora", tmp_path / "aurora")
    with pytest.raises(ValueError, match=r"metadata\.jsonl exists"):
        convert("aurora", tmp_path / "aurora")
    put(tmp_path / "secret.png", png(RED))
    outside = {"instruction": "x", "input": "../secret.png", "output": "data/ag/images/1_right.png"}
    aurora(tmp_path / "another")
    put(tmp_path / "another" / "data" / "ag" / "train.json", [outside])
    with pytest.raises(ValueError, match="leaves the folder"):
        convert("aurora", tmp_path / "another")


LEVELS = {"0_preschool": ("Math", "Biology"), "1_primaryschool": ("Math",), "5_PhD": ("Math", "History")}


def row(level, discipline, number):
    graph = {"elements": ["sun", "water"], "dependencies": ["Causes(sun, water)"]}
    return {
        "question": f"Explain {discipline} {number} for {level}", "key": f"{level}_{discipline}_{number}",
        "Visual Components": graph, "Key Knowledge": {"sun": "it shines"},
    }  # fmt: skip


@pytest.fixture
def downloaded(tmp_path):
    found = {
        level: {name: [row(level, name, k) for k in range(3)] for name in disciplines} for level, disciplines in LEVELS.items()
    }
    found["5_PhD"]["History"] += [{"question": "no key"}, {"key": "no question"}]
    folder = tmp_path / "MMMG_Train"
    folder.mkdir()
    (folder / TRAIN).write_text(json.dumps(found))
    return folder


def pairs(file):
    rows = read_prompts(file, tag_keys=("level", "discipline"))
    return {(rows[k].tags["level"], rows[k].tags["discipline"]) for k in range(len(rows))}


def test_stages_are_cumulative_and_ordered_by_level(downloaded, tmp_path, capsys):
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


def test_a_file_of_difficulties_orders_the_stages(downloaded, tmp_path):
    """The file of difficulties has the format of the TRL writer script's repository."""
    easiest = [("5_PhD", "History", 0.9), ("0_preschool", "Biology", 0.5)]
    tuples = [{"level": level, "discipline": name, "difficulty_score": score} for level, name, score in easiest]
    (downloaded / DIFFICULTY).write_text(json.dumps({"total_tuples": 2, "tuples": tuples}))
    files = write_curriculum(downloaded, out=tmp_path / "lists", stages=5).files
    grown = [pairs(file) for file in files]
    assert grown[0] == {("PhD", "History")}
    assert grown[1] == grown[0] | {("preschool", "Biology")}
    assert grown[2] == grown[1] | {("preschool", "Math")}


def test_invalid_stages_outputs_and_files_raise(downloaded, tmp_path):
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


def test_the_shipped_curriculum_reads_the_converted_lists(downloaded, tmp_path, monkeypatch):
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
