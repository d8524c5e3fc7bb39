"""A run sees what ``dataset[0]`` gives, or the data set is refused with the reason."""

import datetime
import json

import numpy as np
import pytest
from datasets import Array2D, ClassLabel, Dataset, Features, List, Value, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image

from retouch.data.base import DataContext
from retouch.data.sources.stream import IterableData
from retouch.data.sources.table import TableData
from retouch.trainer.arguments import _data as data_of

FEATURES = {"prompt": Value("string"), "image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "flag": Value("bool")}
FEATURES |= {"n": Value("int64"), "note": Value("string"), "grid": Array2D((2, 2), "int32"), "edit": {"a": List(Value("int8"))}}


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8))


def plain(**changes) -> Dataset:
    """Eight rows whose values include 0, False, None and empty texts."""
    rows = [
        {"prompt": f"p{i}", "image": picture(i), "label": i % 2, "flag": i % 2 == 1, "n": i, "note": ["", None, "x"][i % 3]}
        | {"grid": [[i, 1], [2, 3]], "edit": {"a": [0, i]}}
        for i in range(8)
    ]
    return Dataset.from_list(rows, features=Features(FEATURES | changes))


GIVEN = {
    "as loaded": plain,
    "numpy": lambda: plain().with_format("numpy"),
    "torch": lambda: plain().with_format("torch"),
    "pandas": lambda: plain().with_format("pandas"),
    "selected, shuffled and joined": lambda: concatenate_datasets([plain().shuffle(seed=1), plain().select([3, 4])]),
    "mapped": lambda: plain().map(lambda row: {"prompt": row["prompt"] + "!", "n": 0}),
    "images not decoded": lambda: plain().cast_column("image", ImageFeature(decode=False)),
    "some columns only": lambda: plain().with_format(None, columns=["prompt", "n"]),
    "torch for some columns, and all others": lambda: plain().with_format("torch", columns=["n"], output_all_columns=True),
    "a list of its rows": lambda: list(plain()),
    "a list of rows whose images are not decoded": lambda: list(plain().cast_column("image", ImageFeature(decode=False))),
}


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
        "has a transform .* apply it once with dataset.map",
    ),
    "set_transform": (lambda: (data := plain(), data.set_transform(lambda rows: {"prompt": rows["prompt"]}))[0], "has a transform"),
    "images in another mode": (lambda: plain(image=ImageFeature(mode="L")), "converts its images to mode 'L'"),
    "the class 0 as the prompt": (
        lambda: plain().remove_columns("prompt").rename_column("label", "prompt"),
        "'prompt' has the numbers of classes, such as 0",
    ),
    "a class as the text to show": (lambda: plain().rename_column("label", "text"), "'text' has the numbers of classes"),
    "the number 0 as the prompt": (
        lambda: plain().remove_columns("prompt").rename_column("n", "prompt"),
        "'prompt': the instruction should be text, not 0",
    ),
    "a mapping of splits": (lambda: {"train": plain()}, "give one split of it"),
    "a generator": (lambda: ({"prompt": str(n)} for n in range(3)), "not a table|IterableDataset"),
    "a stream of images in another mode": (
        lambda: plain(image=ImageFeature(mode="L")).to_iterable_dataset(),
        "converts its images to mode 'L'",
    ),
}


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
