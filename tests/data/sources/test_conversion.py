"""Small copies of published editing data sets are converted to folders with metadata, which training can read."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from retouch.cli import main
from retouch.data.sources.conversion import convert
from retouch.data.sources.folder import read_folder
from retouch.data.tasks import Tasks

RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour: tuple[int, int, int]) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(content, "PNG")
    return content.getvalue()


def put(path: Path, content: bytes | list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def gpt_image_edit(folder: Path) -> None:
    for task, kind in (("omniedit/addition", "rewrite"), ("omniedit/complex-edit", "complex")):
        put(folder / "gpt-edit" / task / "input" / "1.png", png(RED))
        put(folder / "gpt-edit" / task / "output" / "1.png", png(BLUE))
        name = Path(task).name
        row = {"id": f"omniedit_{name}_1", "dataset_source": "omniedit", "task": name, "instruction_type": kind}
        row |= {
            "input": "input/1.png",
            "output": "output/1.png",
            "instruction": f"{name}: make it blue",
            "input_description": "red",
        }
        absent = {**row, "id": f"omniedit_{name}_2", "output": "output/2.png"}
        put(folder / "gpt-edit" / task / "metadata" / f"omniedit_{name}.json", [row, absent])


def aurora(folder: Path) -> None:
    for name in ("ag", "kubric"):
        put(folder / "data" / name / "images" / "1_left.png", png(RED))
        put(folder / "data" / name / "images" / "1_right.png", png(BLUE))
        row = {
            "instruction": "make it blue",
            "input": f"data/{name}/images/1_left.png",
            "output": f"data/{name}/images/1_right.png",
        }
        put(folder / "data" / name / "train.json", [row])


def parquet(folder: Path, split: str, rows: list[dict]) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")


def cell(colour: tuple[int, int, int]) -> dict:
    return {"bytes": png(colour), "path": None}


def omniedit(folder: Path) -> None:
    row = {"omni_edit_id": "task_add/1", "task": "addition", "edited_prompt_list": ["make it blue", "turn it all blue"]}
    parquet(folder, "train", [{**row, "src_img": cell(RED), "edited_img": cell(BLUE), "width": 8}])


def magicbrush(folder: Path) -> None:
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
def test_a_converted_data_set_is_read_as_tasks(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_turns_of_one_image_have_one_source(tmp_path: Path) -> None:
    magicbrush(tmp_path / "downloaded")
    rows = read_folder(convert("magicbrush", tmp_path / "downloaded", out=tmp_path / "made").folder)
    assert {rows[k].source for k in range(2)} == {"77"}


def test_images_of_parquet_files_keep_their_bytes(tmp_path: Path) -> None:
    omniedit(tmp_path / "downloaded")
    convert("omniedit", tmp_path / "downloaded", out=tmp_path / "made")
    assert [file.read_bytes() for file in (tmp_path / "made" / "images").iterdir()] == [png(RED)]


def test_invalid_inputs_and_options_of_convert_raise(tmp_path: Path) -> None:
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


def test_out_can_be_the_input_folder_given_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aurora(tmp_path / "aurora")
    monkeypatch.chdir(tmp_path)
    assert convert("aurora", "aurora", out=tmp_path / "aurora").rows == 2
    lines = map(json.loads, (tmp_path / "aurora" / "metadata.jsonl").read_text().splitlines())
    assert [line["file_name"] for line in lines] == [f"data/{name}/images/1_left.png" for name in ("ag", "kubric")]


def test_an_image_path_outside_the_folder_raises(tmp_path: Path) -> None:
    aurora(tmp_path / "aurora")
    put(tmp_path / "secret.png", png(RED))
    put(
        tmp_path / "aurora" / "data" / "ag" / "train.json",
        [{"instruction": "x", "input": "../secret.png", "output": "data/ag/images/1_right.png"}],
    )
    with pytest.raises(ValueError, match="leaves the folder"):
        convert("aurora", tmp_path / "aurora")
