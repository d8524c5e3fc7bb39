"""Data sets of the `datasets` library: a run sees what ``dataset[0]`` gives, or the data set is refused with the reason."""

import datetime
import json

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from datasets import Array2D, ClassLabel, Dataset, Features, List, Value, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image

from pictures import encoded
from retouch.data.base import DataContext
from retouch.data.kinds import check, read_path
from retouch.data.sources.hub import TableData, read_hub
from retouch.data.sources.stream import IterableData
from retouch.data.tasks import Tasks
from retouch.trainer.arguments import _data as data_of


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """No progress bars, and a cache of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if not shown:
        datasets.enable_progress_bars()


def png(colour):
    return encoded(Image.new("RGB", (8, 6), colour))


def table(**more):
    image = datasets.Image()
    columns = {
        "source_image": [{"bytes": png("red"), "path": "a.png"}, {"bytes": png("green"), "path": None}],
        "edited_image": [{"bytes": png("blue"), "path": None}, None], "edit_prompt": ["make it blue", "make it red"],
        "edited_prompt_list": [["short", "a longer phrasing"], ["only"]], "score": [7.5, float("nan")],
        "day": [datetime.date(2026, 1, 1)] * 2, **more,
    }  # fmt: skip
    features = datasets.Dataset.from_dict({k: v for k, v in columns.items() if "image" not in k}).features
    features |= {"source_image": image, "edited_image": image}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


COLUMNS = {"instruction": "edit_prompt", "image": "source_image", "target": "edited_image"}


def stored(tmp_path, how):
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
        (255, 0, 0), (0, 0, 255), (0, 128, 0),
    ]  # fmt: skip
    assert first.meta == {"edited_prompt_list": ["short", "a longer phrasing"], "score": 7.5}  # neither dates nor images are JSON
    assert "score" not in second.meta  # nor is NaN
    assert check(rows) == []


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


def test_a_missing_split_column_revision_or_file_raises(tmp_path):
    path = stored(tmp_path, "dict")
    (tmp_path / "empty").mkdir()
    for place, keys, message in (
        (path, {"columns": COLUMNS}, "set split to one of the splits: train, dev"),
        (path, {"columns": COLUMNS, "split": "test"}, "set split to one of the splits: train, dev"),
        (path, {"columns": {"image": "src"}, "split": "dev"}, r"'image' should be read from 'src', but .* has only"),
        (path, {"split": "dev", "revision": "abc"}, "has no revision 'abc'"), (tmp_path / "empty", {}, "empty"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_hub(place, **keys)


def test_a_file_that_is_not_parquet_or_is_damaged_and_a_loading_script_raise(tmp_path):
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
    scripted = tmp_path / "edits"
    scripted.mkdir()
    table().to_parquet(scripted / "train.parquet")
    (scripted / "edits.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="scripts are no longer supported"):
        read_hub(scripted, columns=COLUMNS)
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


FEATURES = {"prompt": Value("string"), "image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "flag": Value("bool")}
FEATURES |= {"n": Value("int64"), "note": Value("string"), "grid": Array2D((2, 2), "int32"), "edit": {"a": List(Value("int8"))}}


def picture(number):
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8))


def plain(**changes):
    """Eight rows whose values include 0, False, None and empty texts."""
    rows = [
        {"prompt": f"p{i}", "image": picture(i), "label": i % 2, "flag": i % 2 == 1, "n": i, "note": ["", None, "x"][i % 3]}
        | {"grid": [[i, 1], [2, 3]], "edit": {"a": [0, i]}}
        for i in range(8)
    ]
    return Dataset.from_list(rows, features=Features(FEATURES | changes))


GIVEN = {
    "as loaded": plain, "numpy": lambda: plain().with_format("numpy"), "torch": lambda: plain().with_format("torch"),
    "pandas": lambda: plain().with_format("pandas"),
    "selected, shuffled and joined": lambda: concatenate_datasets([plain().shuffle(seed=1), plain().select([3, 4])]),
    "mapped": lambda: plain().map(lambda row: {"prompt": row["prompt"] + "!", "n": 0}),
    "images not decoded": lambda: plain().cast_column("image", ImageFeature(decode=False)),
    "some columns only": lambda: plain().with_format(None, columns=["prompt", "n"]),
    "torch for some columns, and all others": lambda: plain().with_format("torch", columns=["n"], output_all_columns=True),
    "a list of its rows": lambda: list(plain()),
    "a list of rows whose images are not decoded": lambda: list(plain().cast_column("image", ImageFeature(decode=False))),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_point_1_5_a_run_sees_the_values_that_the_rows_of_a_data_set_give(case):
    given = GIVEN[case]()
    tasks = TableData.of(given, held_out=0).build(DataContext(eval_split="train")).train
    shown = (
        given.with_format(None, **({} if given.format["output_all_columns"] else {"columns": given.format["columns"]}))
        if (isinstance(given, Dataset))
        else given
    )
    assert len(tasks) == len(shown)
    for task, row in zip(tasks, shown, strict=True):
        image = row.get("image")
        if isinstance(image, dict):
            image = ImageFeature().decode_example(image)
        assert task.instruction == row["prompt"]
        assert [each.tobytes() for each in task.images] == ([] if image is None else [image.tobytes()])
        assert dict(task.meta) == {key: value for key, value in row.items() if key not in ("prompt", "image")}


REFUSED = {
    "random changes at each access": (
        lambda: plain().with_transform(lambda rows: {"prompt": rows["prompt"], "n": [np.random.rand() for _ in rows["prompt"]]}),
        "has a transform .* apply it once with dataset.map"),
    "set_transform": (lambda: (data := plain(), data.set_transform(lambda rows: {"prompt": rows["prompt"]}))[0], "has a transform"),
    "images in another mode": (lambda: plain(image=ImageFeature(mode="L")), "converts its images to mode 'L'"),
    "the class 0 as the prompt": (lambda: plain().remove_columns("prompt").rename_column("label", "prompt"),
        "'prompt' has the numbers of classes, such as 0"),
    "a class as the text to show": (lambda: plain().rename_column("label", "text"), "'text' has the numbers of classes"),
    "the number 0 as the prompt": (lambda: plain().remove_columns("prompt").rename_column("n", "prompt"),
        "'prompt': the instruction should be text, not 0"),
    "a mapping of splits": (lambda: {"train": plain()}, "give one split of it"),
    "a generator": (lambda: ({"prompt": str(n)} for n in range(3)), "not a table|IterableDataset"),
    "a stream of images in another mode": (lambda: plain(image=ImageFeature(mode="L")).to_iterable_dataset(),
        "converts its images to mode 'L'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_point_1_5_a_data_set_whose_rows_would_be_read_otherwise_is_refused(case):
    make, message = REFUSED[case]
    given = make()
    with pytest.raises(ValueError, match=message):
        (TableData if hasattr(given, "__len__") else IterableData).of(given, held_out=1).build(DataContext())


@pytest.mark.parametrize("value", [picture(0), datetime.datetime(2026, 1, 1), b"x"], ids=["image", "date", "bytes"])
@pytest.mark.parametrize("as_list", [True, False])
def test_point_1_5_a_column_that_rewards_cannot_receive_is_none_of_their_columns_and_noted(value, as_list):
    rows = [{"prompt": "a", "n": 0, "depth": value}, {"prompt": "b", "n": 1, "depth": value}]
    data = TableData.of(rows if as_list else Dataset.from_list(rows), held_out=1)
    assert data.other_columns() == {"train_dataset": ["n"]}
    assert any("'depth' has values that are not JSON" in str(problem) for problem in data.build(DataContext()).problems)


@pytest.mark.parametrize("count", [2, 3, 25])
@pytest.mark.parametrize("split", ["test", "train"])
def test_point_1_8_the_same_prompts_work_as_a_list_and_as_a_file(count, split, tmp_path):
    prompts = [f"a {n} circle" for n in range(count)]
    (tmp_path / "a.txt").write_text("\n".join(prompts))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    rows = [{"prompt": prompt} for prompt in prompts]
    found = []
    for given in (rows, Dataset.from_list(rows), str(tmp_path / "a.txt"), tmp_path / "a.jsonl"):
        data, _ = data_of(given, None, None, held_out=split == "test")
        assert not list(data.problems("data", eval_split=split))
        sets = data.build(DataContext(eval_split=split))
        found.append([[task.instruction for task in tasks] for tasks in (sets.train, sets.heldout)])
    assert found == [found[0]] * 4
