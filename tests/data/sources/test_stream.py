"""Streams of files and of ``datasets.IterableDataset`` objects: what is read, what is held out, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from datasets.distributed import split_dataset_by_node

import stream_files
from retouch.config.section import live_objects
from retouch.data.base import DataContext
from retouch.data.rows import RowRequirements
from retouch.data.sources.stream import IterableData, StreamData
from retouch.data.tasks import UnindexedTasks, examples
from retouch_worlds.testing import check_data_source
from slow_params import slow_except


def drawn(sets, steps=4, count=3):
    assert isinstance(sets.train, UnindexedTasks)
    return [task for step in range(steps) for task in sets.train.at_step(step, count=count, places=range(count))]


def built(data, **context):
    return data.build(DataContext(**context))


SUPPORT = Path(__file__).parents[2] / "support"
KEYS = {"held_out": 4, "check": 3, "ahead": 0, "shuffle": 8}


@pytest.mark.parametrize("kind", ["folder", "file", "pattern", "tar folder", "tar pattern"])
def test_files_are_read_from_a_folder_a_file_or_a_pattern(tmp_path, kind):
    make = stream_files.tar if "tar" in kind else stream_files.parquet
    folder = make(tmp_path / "edits", files=2, rows=10)
    ending = {"folder": "", "file": "/train-00001.parquet", "pattern": "/*.parquet", "tar folder": "", "tar pattern": "/train*.tar"}
    sets = built(StreamData(path=f"{folder}{ending[kind]}", **KEYS), size=(6, 8))
    start = 10 if kind == "file" else 0
    assert [task.instruction for task in sets.heldout] == [f"edit {start + number}" for number in range(4)]
    assert [task.instruction for task in examples(sets.train)] == [f"edit {start + number}" for number in range(4, 7)]
    for task in drawn(sets):
        number = int(task.instruction.removeprefix("edit "))
        assert task.images[0].getpixel((0, 0)) == (number, 0, 0)
        assert task.images[0].size == (8, 6)
        assert dict(task.meta) == ({} if "tar" in kind else {"level": number})


@pytest.mark.parametrize("kind", slow_except(["tar"], ["parquet", "tar"]))
def test_hub_files_are_streamed_in_the_same_order_with_and_without_prefetching(tmp_path, kind):
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "hub_dataset.py"), str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows["ahead 0"] == rows["ahead 1"]
    for turn in (rows["ahead 0"][:55], rows["ahead 0"][55:]):
        assert sorted(turn) == sorted(f"edit {number}" for number in range(5, 60))


def test_a_stream_passes_check_data_source(tmp_path):
    check_data_source(StreamData(path=str(stream_files.parquet(tmp_path / "edits")), **KEYS), context=DataContext(size=(16, 16)))


def test_a_stored_iterable_is_found_by_its_name_and_raises_if_it_is_absent():
    stream = datasets.IterableDataset.from_generator(lambda: ({"prompt": f"p{number}"} for number in range(20)))
    data = IterableData.of(stream, **KEYS)
    stored = IterableData.model_validate_json(data.model_dump_json())
    with pytest.raises(ValueError, match="is a Python object of the script that started this run"):
        built(stored)
    with live_objects({f"stream:{data.stream}": stream}):
        first = [task.instruction for task in drawn(built(stored))]
    assert first == [task.instruction for task in drawn(built(data))]
    assert len(set(first)) == 12


def numbered(shards=3):
    return datasets.Dataset.from_list([{"prompt": f"p{number}"} for number in range(40)]).to_iterable_dataset(num_shards=shards)


@pytest.mark.parametrize(
    ("make", "shards"),
    [
        (lambda: numbered(), 3),
        (lambda: numbered().take(30), 1),
        (lambda: numbered().skip(10), 1),
        (lambda: numbered().filter(lambda row: row["prompt"].endswith(("1", "5"))), 3),
        (lambda: numbered().map(lambda rows: {"length": [len(p) for p in rows["prompt"]]}, batched=True, batch_size=7), 3),
        (lambda: numbered().map(lambda row, number: {"n": number}, with_indices=True), 1),
        (lambda: datasets.interleave_datasets([numbered(), numbered().map(lambda row: {"prompt": f"q{row['prompt']}"})]), 1),
        (lambda: datasets.concatenate_datasets([numbered(), numbered().map(lambda row: {"prompt": f"q{row['prompt']}"})]), 6),
    ],
    ids=["plain", "take", "skip", "filter", "map in batches", "map with numbers", "interleaved", "concatenated"],
)
def test_streams_with_map_filter_take_or_skip_keep_every_row_and_resume(make, shards):
    data = IterableData.of(make(), held_out=2, check=2, shuffle=5, ahead=0)
    whole, rows, states = built(data), [], []
    expected = sorted(row["prompt"] for row in make())
    count = len(expected) - 2
    for step in range(count):
        rows += [task.instruction for task in whole.train.at_step(step, count=1, places=[0])]
        states.append(whole.train.state())
    assert states[0]["shards"] == shards
    assert sorted([*rows, *(task.instruction for task in whole.heldout)]) == expected
    for step in (count // 3, count - 3):
        again = built(data).train
        again.load_state(states[step])
        assert [again.at_step(k, count=1, places=[0])[0].instruction for k in (step + 1, step + 2)] == rows[step + 1 : step + 3]


def test_a_stream_is_evaluated_on_a_given_table_or_on_training_rows():
    stream = datasets.Dataset.from_list([{"prompt": f"p{number}"} for number in range(12)]).to_iterable_dataset()
    table = [{"prompt": "held"}, {"prompt": "out"}]
    sets = built(IterableData.of(stream, evaluation=table, check=3, ahead=0))
    assert [task.instruction for task in sets.heldout] == ["held", "out"]
    assert len({task.instruction for task in drawn(sets)}) == 12
    sets = built(IterableData.of(stream, held_out=0, check=3, ahead=0), eval_split="train")
    assert [task.instruction for task in sets.heldout] == ["p0", "p1", "p2"]


def as_stream(*rows):
    return datasets.Dataset.from_list(list(rows)).to_iterable_dataset()


PROMPT = {"prompt": "a cat"}


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (lambda: as_stream({"caption": "a cat"}), "train_dataset: no column with the prompts; it has caption"),
        (lambda: as_stream(PROMPT).shuffle(seed=1), "the buffer of .shuffle\\(\\) is lost when a run resumes"),
        (lambda: as_stream(PROMPT).shuffle(seed=1).map(dict), "the buffer of .shuffle\\(\\) is lost when a run resumes"),
        (lambda: split_dataset_by_node(as_stream(PROMPT), 0, 2), "this is one rank's part of a stream"),
        (lambda: iter([PROMPT]), "list_iterator is not a datasets.IterableDataset; wrap it with"),
        (lambda: datasets.IterableDataset.from_generator(lambda: iter([])), "train_dataset: no rows"),
        (lambda: as_stream(*[PROMPT] * 4), "train_dataset: all 4 rows are held out"),
        (lambda: as_stream(*[{"prompt": ""}] * 9), "train_dataset:1: error: 'prompt': the instruction is empty"),
        (lambda: as_stream(PROMPT, {"prompt": " "}), "train_dataset:2: error: 'prompt': the instruction is empty"),
    ],
    ids=["columns", "shuffled", "shuffled inside", "one rank", "iterator", "empty", "held out", "no prompt", "later row"],
)
def test_unusable_iterable_datasets_raise_with_the_reason(stream, message):
    with pytest.raises(ValueError, match=message):
        built(IterableData.of(stream(), **KEYS))


def test_missing_unknown_and_damaged_stream_files_raise(tmp_path):
    with pytest.raises(ValueError, match="cannot be opened as a stream"):
        built(StreamData(path=str(tmp_path / "none"), **KEYS))
    with pytest.raises(ValueError, match="no file matches this name"):
        built(StreamData(path=str(tmp_path / "*.tar"), **KEYS))
    with pytest.raises(ValueError, match="leave revision out"):
        built(StreamData(path=str(tmp_path / "*.tar"), revision="main", **KEYS))
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"files of the types \.bin; give one of \.parquet, \.tar"):
        built(StreamData(path=str(tmp_path / "*.bin"), **KEYS))
    folder = stream_files.tar(tmp_path / "tar", files=2)
    shard = folder / "train-00001.tar"
    shard.write_bytes(b"\0" * 100 + shard.read_bytes()[100:])
    with pytest.raises(ValueError, match=r"tar\[train\], shard 1: cannot be read \(ReadError"):
        drawn(built(StreamData(path=str(folder), **KEYS)), steps=20)
    folder = stream_files.parquet(tmp_path / "parquet", files=2)
    shard = folder / "train-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cannot be opened as a stream"):
        built(StreamData(path=str(folder), **KEYS))


def test_stream_rows_that_violate_the_requirements_raise(tmp_path):
    folder = stream_files.parquet(tmp_path / "edits")
    required = RowRequirements(mask=True, images=(1, 1), model="flux-fill", takes="one image and a mask")
    with pytest.raises(ValueError, match="flux-fill takes one image and a mask, and this row has no mask"):
        built(StreamData(path=str(folder), **KEYS), required=required)
    with pytest.raises(ValueError, match="no rows that can be used"):
        built(StreamData(path=str(folder), on_bad_row="skip", **KEYS), required=required)


def test_a_known_test_set_is_refused(tmp_path):
    folder = stream_files.parquet(tmp_path / "geneval")
    with pytest.raises(ValueError, match="these are test sets"):
        built(StreamData(path=str(folder), **KEYS))
    assert built(StreamData(path=str(folder), allow_test_sets=True, **KEYS)).test_sets
