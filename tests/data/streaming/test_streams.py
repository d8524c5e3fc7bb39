"""The order of a stream's rows: each row once per pass, and the same order after a resume or a kill, on any number of ranks."""

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

import stream_files
from retouch.data.base import DataContext
from retouch.data.sources.stream import IterableData, StreamData
from retouch.data.streaming import Cursor
from retouch.data.tasks import UnindexedTasks, places_in_step
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
    sets = opened(request.getfixturevalue(kind))
    assert [task.instruction for task in sets.heldout] == [f"edit {number}" for number in range(HELD)]
    rows = [row for step in drawn(sets.train, range(24)) for row in step]
    passes = [rows[turn * ROWS : (turn + 1) * ROWS] for turn in range(3)]
    assert all(sorted(each) == list(range(HELD, 60)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    assert all(each != sorted(each) for each in passes)


def test_the_order_depends_on_the_seed_and_not_on_prefetching(parquet):
    rows = drawn(opened(parquet).train, range(16))
    assert drawn(opened(parquet, ahead=1).train, range(16)) == rows
    assert drawn(opened(parquet, seed=4).train, range(16)) != rows


def test_rows_of_different_files_come_in_one_step(parquet):
    first = drawn(opened(parquet, shuffle=60).train, range(1), count=14)[0]
    assert {number // 20 for number in first} == {0, 1, 2}


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


def run(folder, state, *, rank, world, kill_after, steps=18):
    words = [str(folder), str(state), str(rank), str(world), str(steps), str(kill_after)]
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    command = [python(), "-W", "ignore", str(SUPPORT / "stream_kills.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=300)
    assert done.returncode in (0, -9), done.stderr[-2000:]
    return done.returncode


# Several ranks, without kills: test_ranks_share_the_rows_of_a_step.
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_no_row_is_lost_or_repeated_by_kills(tmp_path, tar, world):
    """Each rank is killed, at other steps than those of its checkpoints. 18 steps of 7 tasks are more than two passes."""
    steps = []
    for rank in range(world):
        state = tmp_path / f"{rank}.json"
        kills = (5, 4) if world == 1 else (7 + rank,)
        codes = [run(tar, state, rank=rank, world=world, kill_after=after) for after in (*kills, 0)]
        assert codes == [*(-9 for _ in kills), 0]
        steps.append(json.loads(state.read_text())["rows"])
    rows = []
    for step in range(18):
        found = dict(entry.split(" ", 1) for rank in steps for entry in rank[step])  # ranks that share a group draw the same row
        assert sorted(map(int, found)) == list(range(7))
        rows += [int(found[str(place)].removeprefix("edit ")) for place in range(7)]
    assert rows == [row for step in drawn(opened(tar).train, range(18)) for row in step]
    assert sorted(rows[:ROWS]) == sorted(rows[ROWS : 2 * ROWS]) == list(range(HELD, 60))


def test_a_process_with_an_open_stream_exits_normally(tmp_path, tar):
    """The prefetching process survives one SIGTERM, and multiprocessing sends only one at the interpreter's exit."""
    script = tmp_path / "holds.py"
    script.write_text(
        "import sys\n"
        "from retouch.data.base import DataContext\n"
        "from retouch.data.sources.stream import StreamData\n"
        "stream = StreamData(path=sys.argv[1], held_out=5, check=3, shuffle=16).build(DataContext(seed=3)).train\n"
        "tasks = stream.at_step(0, count=4, places=range(4))\n"
    )
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    command = [python(), "-W", "ignore", str(script), str(tar)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=120)
    assert done.returncode == 0


def test_threads_of_a_discarded_stream_end_before_the_interpreter_exits(tmp_path, tar):
    """Such a thread can abort the process at its exit. Exit handlers run in reverse order: the script's runs after the stream's."""
    script = tmp_path / "drops.py"
    script.write_text(
        "import atexit, sys, threading, time\n"
        "atexit.register(lambda: print([each.name for each in threading.enumerate() if each.name == 'stream-items']))\n"
        "import stream_kills\n"
        "from retouch.data import streaming as loader\n"
        "load = loader.load_task\n"
        "loader.load_task = lambda *given, **named: (time.sleep(0.3), load(*given, **named))[1]\n"
        "stream_kills.main(sys.argv[1], sys.argv[2], 0, 1, 1, 0)\n"
    )
    command = [python(), "-W", "ignore", str(script), str(tar), str(tmp_path / "state")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]


def test_the_prefetching_process_ends_if_the_run_is_killed(tmp_path, tar):
    """Even while it is blocked on a full pipe, because it prefetches many steps."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from retouch.data.base import DataContext\n"
        "from retouch.data.sources.stream import StreamData\n"
        "stream = StreamData(path=sys.argv[1], held_out=5, check=3, shuffle=16, ahead=60).build(DataContext(seed=3)).train\n"
        "stream.at_step(0, count=7, places=range(7))\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    command = [python(), "-W", "ignore", str(script), str(tar)]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.communicate(timeout=60)  # returns when the last process that holds the pipe has ended
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_resuming_with_another_number_of_shards_raises(tmp_path, parquet):
    state = opened(parquet).train.state()
    other = opened(stream_files.parquet(tmp_path / "other", files=2))
    with pytest.raises(ValueError, match=r"the stream has 8 shards, and had 12 when the checkpoint was written"):
        other.train.load_state(state)


@pytest.mark.parametrize("value", [None, {}, {"position": 0}, {**asdict(Cursor()), "row": -1}, {**asdict(Cursor()), "turn": "0"}])
def test_an_invalid_stream_position_raises(value):
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
