"""One signal ends a run at the end of its step. A run whose reward never returns ends too, with its last complete step."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from folder_faults import WEIGHTS, file_hashes, six_step_recipe
from retouch.config import consent
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.rewards import judging
from retouch.rewards.worker import WorkerThread, close_all, has_abandoned_threads
from retouch.run import checkpoint
from retouch.run.folder import StopRequest, catch_stop_signals
from retouch.run.session import run
from retouch.types import Column
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"


def brightness(samples):
    return {"bright": torch.tensor([sample.image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for sample in samples])}


class HangsInThisProcess:
    """A reward whose fourth call sends SIGTERM to this process and returns only when the test ends."""

    columns: Mapping[str, Column] = {"bright": Column(0.0, 1.0)}
    released: ClassVar[threading.Event] = threading.Event()

    def __init__(self):
        self.count = 0

    def __call__(self, samples):
        self.count += 1
        if self.count == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            self.released.wait(60)
        return brightness(samples)


def test_sigterm_ends_a_run_whose_reward_hangs_and_keeps_the_last_complete_step(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("retouch.run.step.STOP_SECONDS", 1.0)
    document = six_step_recipe(tmp_path, "hung").document()
    document["reward"] = {"kind": "import", "class": "test_stopping:HangsInThisProcess", "combine": {"bright": 1}}
    made = parse(document, allow_imports=["test_stopping"])
    try:
        with consent.allowing(["test_stopping"]):
            assert run(made, fresh=False) == 128 + signal.SIGTERM
    finally:
        HangsInThisProcess.released.set()
    folder = RunFolder(made.folder)
    assert "stopped before the rewards arrived; the checkpoint is" in folder.log(0).read_text()
    newest = checkpoint.latest(folder.checkpoints)
    assert newest is not None
    assert checkpoint.load(newest).step == len(folder.read_metrics()) > 0


class SometimesHangs:
    """A reward that never returns from its ``calls``-th call on while the file ``hang`` exists; it then creates ``hung-RANK``."""

    columns: Mapping[str, Column] = {"bright": Column(0.0, 1.0)}

    def __init__(self, folder, calls):
        judging.CLOSE_SECONDS = 1.0  # in the process of the run; the default is 10 s
        self.folder, self.calls, self.count = Path(folder), calls, 0

    def __call__(self, samples):
        self.count += 1
        if self.count >= self.calls and (self.folder / "hang").exists():
            (self.folder / f"hung-{os.environ.get('RANK', '0')}").touch()
            time.sleep(600)
        return brightness(samples)


def hanging_recipe(out, name, *, calls, every=0):
    """A recipe of six steps with ``SometimesHangs``; ``every``: the interval of evaluations."""
    document = six_step_recipe(out, name).document()
    arguments = {"folder": str(out), "calls": calls}
    document["reward"] = {"kind": "import", "class": "test_stopping:SometimesHangs", "args": arguments, "combine": {"bright": 1}}
    document["eval"] |= {"every": every}
    return parse(document, allow_imports=["test_stopping"])


@contextmanager
def start_training(made, *launch):
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


def finish(made):
    with start_training(made) as process:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed


def stop_while_it_hangs(made, number, *launch, ranks=1):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "calls", "every"), [(signal.SIGTERM, 6, 0), (signal.SIGINT, 6, 0), (signal.SIGHUP, 6, 0), (signal.SIGTERM, 4, 1)]
)
def test_run_stopped_while_its_reward_hangs_in_a_step_or_an_evaluation_resumes_bitwise(number, calls, every, tmp_path):
    whole = hanging_recipe(tmp_path, "whole", calls=100, every=every)
    made = hanging_recipe(tmp_path, "hung", calls=calls, every=every)
    stop_while_it_hangs(made, number)
    finish(made)
    finish(whole)
    compared = (*WEIGHTS, "metrics.jsonl", "evals.jsonl")
    assert file_hashes(made.folder, compared) == file_hashes(whole.folder, compared)


@pytest.mark.slow
def test_a_run_whose_first_evaluation_hangs_ends_without_a_checkpoint(tmp_path):
    made = hanging_recipe(tmp_path, "hung", calls=1)
    assert "there is no checkpoint yet" in stop_while_it_hangs(made, signal.SIGINT)
    assert checkpoint.latest(made.folder / "checkpoints") is None


@pytest.mark.slow
def test_signal_ends_two_ranks_whose_rewards_hang_and_keeps_the_last_complete_step(tmp_path):
    made = hanging_recipe(tmp_path, "hung", calls=4)
    stop_while_it_hangs(made, signal.SIGTERM, "launch", "--nproc", "2", ranks=2)
    newest = checkpoint.latest(made.folder / "checkpoints")
    assert newest is not None
    assert checkpoint.load(newest).step == len(RunFolder(made.folder).read_metrics())


# The worker thread, which can be abandoned


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_is_answered_at_once_and_the_second_stops_the_process(number, capfd):
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


def test_ranks_other_than_the_first_do_not_answer_a_signal(capfd):
    request = StopRequest(threading.Event())
    with catch_stop_signals(request, answer=False):
        os.kill(os.getpid(), signal.SIGTERM)
    assert (request.signal, capfd.readouterr().err) == (signal.SIGTERM, "")


def test_worker_thread_runs_calls_in_order_and_returns_results_and_errors():
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


def test_closing_a_worker_thread_cancels_pending_calls_and_abandons_a_hung_call():
    thread, released = WorkerThread("hangs"), threading.Event()
    first, second = thread.submit(released.wait, 60), thread.submit(released.is_set)
    while not first.running():
        time.sleep(0.01)
    began = time.monotonic()
    assert not close_all([thread], seconds=0.3)
    assert time.monotonic() - began < 5
    assert (second.cancelled(), has_abandoned_threads()) == (True, True)
    released.set()
    first.result(5)
    assert close_all([WorkerThread("unused")], seconds=1)
