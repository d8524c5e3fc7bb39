"""Data sets of the `datasets` library, made here: parquet, saved to disk, imagefolder."""

import datetime
import io
import json

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from retouch.data.check import check, read_path
from retouch.data.rows import sources
from retouch.data.sources.hub import read_hub
from retouch.data.tasks import Tasks


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """No progress bars, and a cache of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if not shown:
        datasets.enable_progress_bars()


def png(colour, size=(8, 6)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def table(**more) -> datasets.Dataset:
    image = datasets.Image()
    columns = {
        "source_image": [{"bytes": png("red"), "path": "a.png"}, {"bytes": png("green"), "path": None}],
        "edited_image": [{"bytes": png("blue"), "path": None}, None],
        "edit_prompt": ["make it blue", "make it red"],
        "edited_prompt_list": [["short", "a longer phrasing"], ["only"]],
        "score": [7.5, float("nan")],
        "day": [datetime.date(2026, 1, 1)] * 2,
        **more,
    }
    features = datasets.Dataset.from_dict({k: v for k, v in columns.items() if "image" not in k}).features
    features |= {"source_image": image, "edited_image": image}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


COLUMNS = {"instruction": "edit_prompt", "image": "source_image", "target": "edited_image"}


def stored(tmp_path, how) -> str:
    path = tmp_path / "edits"
    if how == "disk":
        table().save_to_disk(path)
    elif how == "dict":
        datasets.DatasetDict(train=table(), dev=table()).save_to_disk(path)
    elif how == "folder":
        path.mkdir()
        table().to_parquet(path / "train-00000.parquet")
    else:
        path = tmp_path / "edits.parquet"
        table().to_parquet(path)
    return str(path)


@pytest.mark.parametrize("how", ["disk", "dict", "folder", "file"])
def test_every_kind_of_storage_gives_the_same_tasks(tmp_path, how):
    rows = read_hub(stored(tmp_path, how), split="train", columns=COLUMNS, name="edits")
    first, second = Tasks(rows, resize=None)
    assert (first.id, first.instruction, second.id, second.target) == ("edits/1", "make it blue", "edits/2", None)
    assert [image.getpixel((0, 0)) for image in (*first.images, first.target, *second.images)] == [
        (255, 0, 0),
        (0, 0, 255),
        (0, 128, 0),
    ]
    assert first.meta == {"edited_prompt_list": ["short", "a longer phrasing"], "score": 7.5}  # neither dates nor images are JSON
    assert "score" not in second.meta  # nor is NaN
    assert check(rows) == []


def test_a_column_prompt_is_the_instruction(tmp_path):
    prompts = datasets.Dataset.from_dict({"image": [{"bytes": png("red")}], "prompt": ["a red square"]})
    prompts.save_to_disk(tmp_path / "prompts")
    assert read_hub(tmp_path / "prompts")[0].instruction == "a red square"


def test_the_first_of_several_phrasings_is_the_instruction(tmp_path):
    rows = read_hub(stored(tmp_path, "disk"), columns={**COLUMNS, "instruction": "edited_prompt_list"})
    assert [rows[0].instruction, rows[1].instruction] == ["short", "only"]


def test_a_dotted_column_name_reads_nested_values(tmp_path):
    edit = [{"compound": [{"compound_instruction": f"{row}, {level} changes"} for level in (1, 2)]} for row in range(2)]
    table(edit=edit).save_to_disk(tmp_path / "edits")
    rows = read_hub(tmp_path / "edits", columns={**COLUMNS, "instruction": "edit.compound.1.compound_instruction"})
    assert rows[1].instruction == "1, 2 changes"
    beyond = read_hub(tmp_path / "edits", columns={**COLUMNS, "instruction": "edit.compound.2.compound_instruction"})
    with pytest.raises(ValueError, match=r"edits\[all\]:1: error: 'edit\.compound\.2\.compound_instruction': no instruction"):
        beyond[0]


def test_lists_of_images_and_raw_image_bytes_are_read(tmp_path):
    features = datasets.Features(
        instruction=datasets.Value("string"), images=datasets.List(datasets.Image()), mask=datasets.Value("binary")
    )
    rows = {"instruction": ["x"], "images": [[{"bytes": png("red")}, {"bytes": png("blue")}]], "mask": [png("white")]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    task = Tasks(read_hub(tmp_path / "set"), resize=None)[0]
    assert [image.getpixel((0, 0)) for image in task.images] == [(255, 0, 0), (0, 0, 255)]
    assert (task.mask.mode, task.mask.getpixel((0, 0))) == ("L", 255)


def test_an_imagefolder_is_read_from_its_own_files(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(png("red"))
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "instruction": "x"}) + "\n")
    task = Tasks(read_hub(folder, split="train"), resize=None)[0]
    assert np.asarray(task.images[0]).tolist() == [[[255, 0, 0]] * 8] * 6


def test_a_folder_named_like_a_file_format_is_read(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    table().to_parquet(tmp_path / "json/train.parquet")
    monkeypatch.chdir(tmp_path)
    assert read_hub("json", columns=COLUMNS)[0].instruction == "make it blue"


def test_image_paths_that_point_outside_the_data_set_are_reported(tmp_path, monkeypatch):
    (tmp_path / "secret.png").write_bytes(png("red"))
    for path in (str(tmp_path / "secret.png"), str(tmp_path / "edits/../secret.png"), "zip://a.png::https://example.com/a.zip"):
        image = datasets.Features(instruction=datasets.Value("string"), image=datasets.Image())
        rows = datasets.Dataset.from_dict({"instruction": ["x"], "image": [{"path": path, "bytes": None}]}, features=image)
        (tmp_path / "edits").mkdir(exist_ok=True)
        # Not to_parquet, which would put the file's own bytes into the table.
        pyarrow.parquet.write_table(rows.data.table, tmp_path / "edits/train.parquet")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / path.replace("/", "_")[-40:])
        problems = check(read_hub(tmp_path / "edits"))
        assert ["is outside the data set" in problem.what for problem in problems] == [True]


def test_the_source_is_a_hash_of_the_image_or_the_value_of_a_source_column(tmp_path):
    table(img_id=["1", "1"]).save_to_disk(tmp_path / "edits")
    plain = sources(read_hub(tmp_path / "edits", columns=COLUMNS), [0, 1])
    assert len(set(plain)) == 2
    assert all(len(source) == 64 for source in plain)
    assert sources(read_hub(tmp_path / "edits", columns={**COLUMNS, "source": "img_id"}), [0, 1]) == ["1", "1"]


def test_a_missing_split_column_revision_or_file_raises(tmp_path):
    path = stored(tmp_path, "dict")
    with pytest.raises(ValueError, match="set split to one of the splits: train, dev"):
        read_hub(path, columns=COLUMNS)
    with pytest.raises(ValueError, match="set split to one of the splits: train, dev"):
        read_hub(path, split="test", columns=COLUMNS)
    with pytest.raises(ValueError, match=r"'image' should be read from 'src', but .* has only"):
        read_hub(path, split="dev", columns={"image": "src"})
    with pytest.raises(ValueError, match="has no revision 'abc'"):
        read_hub(path, split="dev", revision="abc")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="empty"):
        read_hub(empty)


def test_a_file_that_is_not_parquet_or_is_damaged_raises_with_its_path(tmp_path):
    (tmp_path / "edits.csv").write_text("instruction,image\nblue,a.png\n")
    with pytest.raises(ValueError, match=r"edits\.csv: not a parquet file; for CSV or JSONL use a folder with metadata\.csv"):
        read_hub(tmp_path / "edits.csv")
    for folder, name in ((".", "cut.parquet"), ("folder", "train.parquet"), ("lines", "train.json")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(b"PAR1 {cut")
    for path in (tmp_path / "cut.parquet", tmp_path / "folder", tmp_path / "lines"):
        with pytest.raises(ValueError, match=r"^\S+: `datasets` cannot read it: .*(not a parquet file|JSON)") as raised:
            read_hub(path)
        assert str(raised.value).startswith(str(path))
    (problem,) = check(tmp_path / "cut.parquet")
    assert "cannot read it" in str(problem)


def test_a_data_set_with_a_loading_script_raises_and_runs_no_code(tmp_path):
    folder = tmp_path / "edits"
    folder.mkdir()
    table().to_parquet(folder / "train.parquet")
    (folder / "edits.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="scripts are no longer supported"):
        read_hub(folder, columns=COLUMNS)
    assert not (tmp_path / "ran").exists()


def test_invalid_cells_are_reported_with_their_row(tmp_path):
    rows = {
        "image": [{"bytes": png("red")[:45]}, {"bytes": b""}, None, {"bytes": png("red")}],
        "instruction": ["cut", "empty", "none", None],
    }
    features = datasets.Features(image=datasets.Image(), instruction=datasets.Value("string"))
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "bad")
    problems = check(read_path(tmp_path / "bad"))
    assert [(problem.line, problem.severity) for problem in problems] == [(1, "error"), (2, "error"), (3, "error"), (4, "error")]
    words = ["truncated", "without bytes", "no source image", "no instruction"]
    assert all(word in problem.what for word, problem in zip(words, problems, strict=True))
