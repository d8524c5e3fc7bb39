"""One signal ends a run at the end of its step. A run whose reward never returns ends too, with its last complete step."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from folder_faults import WEIGHTS, file_hashes, six_step_recipe
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.rewards import judging
from retouch.rewards.worker import WorkerThread, close_all, has_abandoned_threads
from retouch.run import checkpoint
from retouch.run.folder import StopRequest, catch_stop_signals
from retouch.types import Column, Sample, Scores
from slow_params import slow_after
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"


class SometimesHangs:
    """A reward that never returns from its ``calls``-th call on while the file ``hang`` exists; it then creates ``hung-RANK``."""

    columns: Mapping[str, Column] = {"bright": Column(0.0, 1.0)}

    def __init__(self, folder: str, calls: int) -> None:
        judging.CLOSE_SECONDS = 1.0  # in the process of the run; the default is 10 s
        self.folder, self.calls, self.count = Path(folder), calls, 0

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        self.count += 1
        if self.count >= self.calls and (self.folder / "hang").exists():
            (self.folder / f"hung-{os.environ.get('RANK', '0')}").touch()
            time.sleep(600)
        return {
            "bright": torch.tensor(
                [sum(sample.image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for _ in "1") for sample in samples]
            )
        }


def hanging_recipe(out: Path, name: str, *, calls: int, every: int = 0) -> Recipe:
    """A recipe of six steps with ``SometimesHangs``; ``every``: the interval of evaluations."""
    document = six_step_recipe(out, name).document()
    arguments = {"folder": str(out), "calls": calls}
    document["reward"] = {"kind": "import", "class": "test_stopping:SometimesHangs", "args": arguments, "combine": {"bright": 1}}
    document["eval"] |= {"every": every}
    return parse(document, allow_imports=["test_stopping"])


@contextmanager
def start_training(made: Recipe, *launch: str) -> Iterator["subprocess.Popen[str]"]:
    """`retouch train`, or `retouch launch`, of the recipe."""
    file = made.folder.with_name(f"{made.name}.json")
    file.write_text(made.model_dump_json())
    path = os.pathsep.join([str(Path(__file__).parent), str(SUPPORT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RETOUCH_ALLOW_IMPORTS": "test_stopping"}
    command = [python(), "-W", "ignore", "-m", "retouch.cli", *(launch or ("train",)), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(made: Recipe, *launch: str) -> str:
    """Train to the end, and return what was printed."""
    with start_training(made, *launch) as process:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    return printed


def stop_while_it_hangs(made: Recipe, number: signal.Signals, *launch: str, ranks: int = 1) -> str:
    """What was printed by a run that got one signal while its reward hung."""
    out = made.folder.parent
    (out / "hang").touch()
    with start_training(made, *launch) as process:
        for _ in range(4000):
            if all((out / f"hung-{rank}").exists() for rank in range(ranks)):
                break
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.03)
        time.sleep(0.3)
        process.send_signal(number)
        began = time.monotonic()
        printed, _ = process.communicate(timeout=100)
        assert time.monotonic() - began < 60
        assert process.returncode == 128 + (signal.SIGTERM if launch and number == signal.SIGHUP else number), printed
    assert "Traceback" not in printed
    (out / "hang").unlink()
    return printed


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_signal_ends_a_run_whose_reward_hangs_and_keeps_the_last_complete_step(number: signal.Signals, tmp_path: Path) -> None:
    whole, made = hanging_recipe(tmp_path, "whole", calls=100), hanging_recipe(tmp_path, "hung", calls=6)
    printed = stop_while_it_hangs(made, number)
    assert "stopped before the rewards arrived; the checkpoint is" in printed
    newest = checkpoint.latest(made.folder / "checkpoints")
    assert newest is not None
    assert checkpoint.load(newest).step == len(RunFolder(made.folder).read_metrics()) > 0
    if number == signal.SIGTERM:
        finish(made)
        finish(whole)
        assert file_hashes(made.folder, (*WEIGHTS, "metrics.jsonl")) == file_hashes(whole.folder, (*WEIGHTS, "metrics.jsonl"))


@pytest.mark.slow
def test_evaluation_interrupted_by_a_hanging_reward_is_repeated_after_the_resume(tmp_path: Path) -> None:
    whole, made = hanging_recipe(tmp_path, "whole", calls=100, every=1), hanging_recipe(tmp_path, "hung", calls=4, every=1)
    stop_while_it_hangs(made, signal.SIGTERM)
    finish(made)
    finish(whole)
    assert file_hashes(made.folder, (*WEIGHTS, "evals.jsonl")) == file_hashes(whole.folder, (*WEIGHTS, "evals.jsonl"))


@pytest.mark.slow
def test_a_run_whose_first_evaluation_hangs_ends_without_a_checkpoint(tmp_path: Path) -> None:
    made = hanging_recipe(tmp_path, "hung", calls=1)
    assert "there is no checkpoint yet" in stop_while_it_hangs(made, signal.SIGINT)
    assert checkpoint.latest(made.folder / "checkpoints") is None


@pytest.mark.slow
def test_signal_ends_two_ranks_whose_rewards_hang_and_keeps_the_last_complete_step(tmp_path: Path) -> None:
    made = hanging_recipe(tmp_path, "hung", calls=4)
    stop_while_it_hangs(made, signal.SIGTERM, "launch", "--nproc", "2", ranks=2)
    newest = checkpoint.latest(made.folder / "checkpoints")
    assert newest is not None
    assert checkpoint.load(newest).step == len(RunFolder(made.folder).read_metrics())


# The worker thread, which can be abandoned


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_is_answered_at_once_and_the_second_stops_the_process(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    request = StopRequest(threading.Event())
    seen: list[int] = []
    before = signal.signal(number, lambda each, _: seen.append(each))
    try:
        with catch_stop_signals(request, answer=True):
            os.kill(os.getpid(), number)
            first = capfd.readouterr().err
            assert request.signal == number
            assert request.pending
            assert not seen
            os.kill(os.getpid(), number)
            assert seen == [number]
    finally:
        signal.signal(number, before)
    assert f"{number.name}: stopping after this step" in first
    assert "a second signal stops at once" in first
    assert capfd.readouterr().err == ""


def test_ranks_other_than_the_first_do_not_answer_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    request = StopRequest(threading.Event())
    with catch_stop_signals(request, answer=False):
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.signal == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_worker_thread_runs_calls_in_order_and_returns_results_and_errors() -> None:
    thread = WorkerThread("test")
    seen: list[int] = []
    futures = [thread.submit(seen.append, number) for number in range(50)]
    broken = thread.submit(lambda: 1 / 0)
    assert [future.result() for future in futures] == [None] * 50
    assert seen == list(range(50))
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert thread.close(seconds=5)
    with pytest.raises(RuntimeError, match="is closed"):
        thread.submit(print)


def test_closing_a_worker_thread_cancels_pending_calls_and_abandons_a_hung_call() -> None:
    code = """
import time
from retouch.rewards.worker import WorkerThread, close_all, has_abandoned_threads
from retouch.run.folder import StopRequest, catch_stop_signals
thread = WorkerThread("hangs")
first, second = thread.submit(time.sleep, 600), thread.submit(print, "never")
while not first.running(): time.sleep(0.01)
began = time.monotonic()
print(close_all([thread], seconds=0.3), time.monotonic() - began < 5, second.cancelled(), has_abandoned_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False True True True\n"
    assert not has_abandoned_threads()
    assert close_all([WorkerThread("unused")], seconds=1)
