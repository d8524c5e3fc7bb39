"""Streams of files and iterables: what is read, held out and refused, and the same order after a resume or a kill, on any ranks."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import datasets
import pytest
from datasets.distributed import split_dataset_by_node

import stream_files
from retouch.config.section import live_objects
from retouch.data.base import DataContext
from retouch.data.rows import RowRequirements
from retouch.data.sources.stream import IterableData, StreamData
from retouch.data.streaming import Cursor
from retouch.data.tasks import UnindexedTasks, examples, places_in_step
from retouch_worlds.testing import check_data_source
from slow_params import slow_except
from warm_python import python

SUPPORT = Path(__file__).parents[2] / "support"
HELD, ROWS = 5, 55
"""Of 60 rows, the first five are held out."""


def opened(folder, *, ahead=0, seed=3, **keys):
    keys = {"held_out": HELD, "check": 3, "shuffle": 16, "ahead": ahead, **keys}
    sets = StreamData(path=str(folder), **keys).build(DataContext(seed=seed))
    assert isinstance(sets.train, UnindexedTasks)
    return sets


def numbers(tasks, places):
    return [int(tasks[place].instruction.removeprefix("edit ")) for place in places]


def drawn(stream, steps, *, count=7, places=None):
    places = range(count) if places is None else places
    return [numbers(stream.at_step(step, count=count, places=places), places) for step in steps]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    return stream_files.parquet(tmp_path_factory.mktemp("stream") / "parquet")


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    return stream_files.tar(tmp_path_factory.mktemp("stream") / "tar")


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_each_pass_draws_every_row_once_in_a_different_order(kind, request):
    folder = request.getfixturevalue(kind)
    sets = opened(folder)
    assert [task.instruction for task in sets.heldout] == [f"edit {number}" for number in range(HELD)]
    steps = drawn(sets.train, range(24))
    rows = [row for step in steps for row in step]
    passes = [rows[turn * ROWS : (turn + 1) * ROWS] for turn in range(3)]
    assert all(sorted(each) == list(range(HELD, 60)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    assert all(each != sorted(each) for each in passes)
    assert drawn(opened(folder, ahead=1).train, range(16)) == steps[:16]
    assert drawn(opened(folder, seed=4).train, range(16)) != steps[:16]
    first = drawn(opened(folder, shuffle=60).train, range(1), count=14)[0]
    assert {number // 20 for number in first} == {0, 1, 2}, "rows of each file"


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_a_stream_resumes_at_the_same_row_from_any_step(kind, request):
    folder = request.getfixturevalue(kind)
    whole = opened(folder).train
    rows, states = [], []
    for step in range(17):
        rows += drawn(whole, [step])
        states.append(json.loads(json.dumps(whole.state())))
    for step in range(0, 16, 3):
        again = opened(folder).train
        again.load_state(states[step])
        assert drawn(again, range(step + 1, 17)) == rows[step + 1 :]
    assert all(len(json.dumps(state)) < 1500 for state in states)
    assert max(state["cursor"]["position"] for state in states) > 100
    # Without a state, and backwards, the rows are the same; they only take longer to read.
    assert drawn(opened(folder).train, [16, 9, 9, 2, 3]) == [rows[16], rows[9], rows[9], rows[2], rows[3]]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_rows_of_a_step(parquet, world):
    alone = drawn(opened(parquet).train, range(10), count=6)
    ranks = []
    for rank in range(world):
        places = places_in_step(count=6, group_size=4, minibatches=1, rank=rank, world=world)
        ranks.append(drawn(opened(parquet).train, range(10), count=6, places=places))
    assert [[row for rank in ranks for row in rank[step]] for step in range(10)] == alone


def program(*words, **more):
    """A program of Python with the modules of the tests; `words` are its file and arguments."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [python(), "-W", "ignore", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def ended(*words):
    """What such a program returns, prints and writes to stderr."""
    with program(*words) as process:
        printed, errors = process.communicate(timeout=300)
    return process.returncode, printed.strip(), errors[-2000:]


# Several ranks, without kills: test_ranks_share_the_rows_of_a_step.
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_no_row_is_lost_or_repeated_by_kills(tmp_path, tar, world):
    """Each rank is killed, at other steps than those of its checkpoints. 18 steps of 7 tasks are more than two passes."""
    steps = []
    for rank in range(world):
        state = tmp_path / f"{rank}.json"
        kills = (5, 4) if world == 1 else (7 + rank,)
        script = SUPPORT / "stream_kills.py"
        found = [ended(script, tar, state, rank, world, 18, after) for after in (*kills, 0)]
        assert [code for code, _, _ in found] == [*(-9 for _ in kills), 0], found
        steps.append(json.loads(state.read_text())["rows"])
    rows = []
    for step in range(18):
        found = dict(entry.split(" ", 1) for rank in steps for entry in rank[step])  # ranks that share a group draw the same row
        assert sorted(map(int, found)) == list(range(7))
        rows += [int(found[str(place)].removeprefix("edit ")) for place in range(7)]
    assert rows == [row for step in drawn(opened(tar).train, range(18)) for row in step]
    assert sorted(rows[:ROWS]) == sorted(rows[ROWS : 2 * ROWS]) == list(range(HELD, 60))


OPENS_STREAM = """
import os, signal, sys, time
from retouch.data.base import DataContext
from retouch.data.sources.stream import StreamData
stream = StreamData(path=sys.argv[1], held_out=5, check=3, shuffle=16, ahead=int(sys.argv[2])).build(DataContext(seed=3)).train
tasks = stream.at_step(0, count=7, places=range(7))
"""


def test_a_process_with_an_open_stream_exits_normally(tmp_path, tar):
    """The prefetching process survives one SIGTERM, and multiprocessing sends only one at the interpreter's exit."""
    (tmp_path / "holds.py").write_text(OPENS_STREAM)
    assert ended(tmp_path / "holds.py", tar, 2)[0] == 0


def test_threads_of_a_discarded_stream_end_before_the_interpreter_exits(tmp_path, tar):
    """Such a thread can abort the process at its exit. Exit handlers run in reverse order: the script's runs after the stream's."""
    (tmp_path / "drops.py").write_text(
        "import atexit, sys, threading, time\n"
        "atexit.register(lambda: print([each.name for each in threading.enumerate() if each.name == 'stream-items']))\n"
        "import stream_kills\n"
        "from retouch.data import streaming as loader\n"
        "load = loader.load_task\n"
        "loader.load_task = lambda *given, **named: (time.sleep(0.3), load(*given, **named))[1]\n"
        "stream_kills.main(sys.argv[1], sys.argv[2], 0, 1, 1, 0)\n"
    )
    code, printed, errors = ended(tmp_path / "drops.py", tar, tmp_path / "state")
    assert (code, printed) == (0, "[]"), errors


def test_the_prefetching_process_ends_if_the_run_is_killed(tmp_path, tar):
    """Even while it is blocked on a full pipe, because it prefetches many steps."""
    (tmp_path / "killed.py").write_text(f"{OPENS_STREAM}\ntime.sleep(0.5)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with program(tmp_path / "killed.py", tar, 60, start_new_session=True) as process:
        try:
            process.communicate(timeout=60)  # returns when the last process that holds the pipe has ended
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_a_position_that_is_invalid_or_of_another_number_of_shards_raises(tmp_path, parquet):
    state = opened(parquet).train.state()
    other = opened(stream_files.parquet(tmp_path / "other", files=2))
    with pytest.raises(ValueError, match=r"the stream has 8 shards, and had 12 when the checkpoint was written"):
        other.train.load_state(state)
    for value in (None, {}, {"position": 0}, {**asdict(Cursor()), "row": -1}, {**asdict(Cursor()), "turn": "0"}):
        with pytest.raises(ValueError, match="place in the stream cannot be read"):
            Cursor.from_json(value)


def test_a_row_that_cannot_be_decoded_stops_the_run_or_is_replaced(tmp_path):
    folder = stream_files.parquet(tmp_path / "stream", damaged=(30,))
    for ahead in (0, 1):
        with pytest.raises(ValueError, match=r"shard 5:5: an image in the table: not a PNG.*data.on_bad_row: 'skip'"):
            drawn(opened(folder, ahead=ahead).train, range(8))
        rows = [row for step in drawn(opened(folder, on_bad_row="skip", ahead=ahead).train, range(8)) for row in step][:ROWS]
        assert 30 not in rows
        assert set(rows) == set(range(HELD, 60)) - {30}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_prefetching_process_survives_sigint_and_sigterm(parquet, stop):
    """A terminal and a cluster send their signal to all processes, and the run may still finish a step."""
    stream = opened(parquet, ahead=1).train
    rows = drawn(stream, range(2))
    for child in multiprocessing.active_children():
        os.kill(child.pid, stop)
    assert multiprocessing.active_children()
    assert rows + drawn(stream, range(2, 8)) == drawn(opened(parquet).train, range(8))
    stream.close()
    assert not multiprocessing.active_children()


def test_an_exception_of_a_map_function_is_raised_in_the_run():
    def broken(row):
        return {"x": {"a": 1}["b"]} if row["n"] == 30 else {"x": 0}

    rows = datasets.Dataset.from_list([{"prompt": f"edit {number}", "n": number} for number in range(60)])
    stream = rows.to_iterable_dataset().map(broken)
    for ahead in (0, 1):
        train = IterableData.of(stream, held_out=HELD, check=3, shuffle=16, ahead=ahead).build(DataContext()).train
        with pytest.raises(KeyError, match="b"):
            drawn(train, range(8))
        train.close()


@pytest.mark.slow
def test_a_step_with_more_tasks_than_the_stream_has_rows_raises(parquet):
    with pytest.raises(ValueError, match="the stream has 55 rows for training, and a step draws 56 tasks"):
        drawn(opened(parquet).train, [0], count=56)
    assert len(drawn(opened(parquet).train, [0], count=55)[0]) == 55


def drawn_tasks(sets, steps=4, count=3):
    assert isinstance(sets.train, UnindexedTasks)
    return [task for step in range(steps) for task in sets.train.at_step(step, count=count, places=range(count))]


def built(data, **context):
    return data.build(DataContext(**context))


KEYS = {"held_out": 4, "check": 3, "ahead": 0, "shuffle": 8}


@pytest.mark.parametrize("kind", slow_except(["tar folder"], ["folder", "file", "pattern", "tar folder", "tar pattern"]))
def test_files_are_read_from_a_folder_a_file_or_a_pattern(tmp_path, kind):
    make = stream_files.tar if "tar" in kind else stream_files.parquet
    folder = make(tmp_path / "edits", files=2, rows=10)
    ending = {"folder": "", "file": "/train-00001.parquet", "pattern": "/*.parquet", "tar folder": "", "tar pattern": "/train*.tar"}
    sets = built(StreamData(path=f"{folder}{ending[kind]}", **KEYS), size=(6, 8))
    start = 10 if kind == "file" else 0
    assert [task.instruction for task in sets.heldout] == [f"edit {start + number}" for number in range(4)]
    assert [task.instruction for task in examples(sets.train)] == [f"edit {start + number}" for number in range(4, 7)]
    for task in drawn_tasks(sets):
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


def test_a_stored_iterable_is_found_by_its_name_and_raises_if_it_is_absent():
    stream = datasets.IterableDataset.from_generator(lambda: ({"prompt": f"p{number}"} for number in range(20)))
    data = IterableData.of(stream, **KEYS)
    stored = IterableData.model_validate_json(data.model_dump_json())
    with pytest.raises(ValueError, match="is a Python object of the script that started this run"):
        built(stored)
    with live_objects({f"stream:{data.stream}": stream}):
        first = [task.instruction for task in drawn_tasks(built(stored))]
    assert first == [task.instruction for task in drawn_tasks(built(data))]
    assert len(set(first)) == 12


def as_stream(*rows, shards=1):
    return datasets.Dataset.from_list(list(rows)).to_iterable_dataset(num_shards=shards)


def numbered(shards=3):
    return as_stream(*({"prompt": f"p{number}"} for number in range(40)), shards=shards)


PROMPT = {"prompt": "a cat"}


@pytest.mark.parametrize(
    ("make", "shards"),
    [
        (lambda: numbered(), 3), (lambda: numbered().take(30), 1), (lambda: numbered().skip(10), 1),
        (lambda: numbered().filter(lambda row: row["prompt"].endswith(("1", "5"))), 3),
        (lambda: numbered().map(lambda rows: {"length": [len(p) for p in rows["prompt"]]}, batched=True, batch_size=7), 3),
        (lambda: numbered().map(lambda row, number: {"n": number}, with_indices=True), 1),
        (lambda: datasets.interleave_datasets([numbered(), numbered().map(lambda row: {"prompt": f"q{row['prompt']}"})]), 1),
        (lambda: datasets.concatenate_datasets([numbered(), numbered().map(lambda row: {"prompt": f"q{row['prompt']}"})]), 6),
    ],
    ids=["plain", "take", "skip", "filter", "map in batches", "map with numbers", "interleaved", "concatenated"],
)  # fmt: skip
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
    assert len({task.instruction for task in drawn_tasks(sets)}) == 12
    sets = built(IterableData.of(stream, held_out=0, check=3, ahead=0), eval_split="train")
    assert [task.instruction for task in sets.heldout] == ["p0", "p1", "p2"]


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
    (tmp_path / "a.bin").write_bytes(b"x")
    tars = stream_files.tar(tmp_path / "tar", files=2)
    shard = tars / "train-00001.tar"
    shard.write_bytes(b"\0" * 100 + shard.read_bytes()[100:])
    cut = stream_files.parquet(tmp_path / "parquet", files=2)
    shard = cut / "train-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    for path, more, message in (
        (tmp_path / "none", {}, "cannot be opened as a stream"),
        (tmp_path / "*.tar", {}, "no file matches this name"),
        (tmp_path / "*.tar", {"revision": "main"}, "leave revision out"),
        (tmp_path / "*.bin", {}, r"files of the types \.bin; give one of \.parquet, \.tar"),
        (cut, {}, "cannot be opened as a stream"),
        (tars, {}, r"tar\[train\], shard 1: cannot be read \(ReadError"),
    ):
        with pytest.raises(ValueError, match=message):
            drawn_tasks(built(StreamData(path=str(path), **more, **KEYS)), steps=20)


def test_rows_that_violate_the_requirements_and_known_test_sets_raise(tmp_path):
    path = str(stream_files.parquet(tmp_path / "geneval"))
    required = RowRequirements(mask=True, images=(1, 1), model="flux-fill", takes="one image and a mask")
    with pytest.raises(ValueError, match="these are test sets"):
        built(StreamData(path=path, **KEYS))
    allowed = {"path": path, "allow_test_sets": True, **KEYS}
    for on_bad_row, message in (
        ("refuse", "flux-fill takes one image and a mask, and this row has no mask"),
        ("skip", "no rows that"),
    ):
        with pytest.raises(ValueError, match=message):
            built(StreamData(**allowed, on_bad_row=on_bad_row), required=required)
    assert built(StreamData(**allowed)).test_sets
    check_data_source(StreamData(**allowed), context=DataContext(size=(16, 16)))
