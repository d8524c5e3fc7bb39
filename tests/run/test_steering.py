"""Requests to a run that is training: they are handled and answered at the end of a step, and results stay bitwise equal."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from folder_faults import WEIGHTS, file_hashes, six_step_recipe
from retouch import cli
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import parse
from retouch.records import control
from retouch.records.control import ControlRequest, make_request, read_requests
from retouch.records.folder import RunFolder
from retouch.records.ownership import Owner
from retouch.run.hooks import Hook
from retouch.run.session import ControlRequests, open_session
from retouch.types import Column
from warm_python import python

COMPUTED = (*WEIGHTS, "metrics.jsonl", "evals.jsonl")


class MakesRequests(Hook):
    """Makes requests within steps: ``requests[step]`` is an action and a value."""

    def __init__(self, folder, requests):
        self.folder, self.requests = RunFolder(folder), requests
        self.saved_steps: list[int] = []

    def after_step(self, result, collected):
        if result.step in self.requests:
            make_request(self.folder, *self.requests[result.step], via="test")

    def saved(self, step, checkpoint):
        self.saved_steps.append(step)


def trained(made, requests):
    listener = MakesRequests(made.folder, requests)
    with open_session(made, fresh=False, hooks=[listener], own_process=False) as session:
        done = [result.step for result in session.steps()]
        assert session.code in (0, 128 + signal.SIGTERM)
        return (done[-1] if done else 0), listener


def answers(made):
    return [(each.action, each.taken, each.step) for each in read_requests(RunFolder(made.folder)).values()]


def environment():
    """The environment variables of a process that imports this file."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RETOUCH_ALLOW_IMPORTS": "test_steering"}


def train_with_and_without_requests(out):
    whole, made = six_step_recipe(out, "whole"), six_step_recipe(out, "asked")
    assert trained(whole, {})[0] == 6
    stopped, listener = trained(made, {1: ("checkpoint", None), 3: ("stop", None)})
    assert (stopped, listener.saved_steps) == (3, [1, 2, 3])
    assert answers(made) == [("checkpoint", True, 1), ("stop", True, 3)]
    ended, listener = trained(made, {6: ("stop", None)})
    assert (ended, listener.saved_steps) == (6, [4, 6])
    assert answers(made)[2:] == [("stop", False, 6)]
    assert file_hashes(made.folder, COMPUTED) == file_hashes(whole.folder, COMPUTED)
    assert not (whole.folder / "control").exists()


@pytest.mark.slow
def test_run_with_control_requests_is_bitwise_equal_to_one_without(tmp_path):
    """In a process without the type checker of the tests, which draws from Python's generator, whose state is compared too."""
    code = "import sys; from pathlib import Path; import test_steering as t; t.train_with_and_without_requests(Path(sys.argv[1]))"
    command = [python(), "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_samples_are_stored_more_often_on_request(tmp_path):
    made = six_step_recipe(tmp_path, "asked")
    made = made.model_copy(update={"samples": made.samples.model_copy(update={"every": 0})})
    trained(made, {1: ("samples", 2), 4: ("samples", 0)})
    lines = {step: {line["set"] for line in RunFolder(made.folder).read_samples(step)} for step in (1, 2, 4, 6)}
    assert {step for step, sets in lines.items() if "group" in sets} == {2, 4}
    assert answers(made) == [("samples", True, 1), ("samples", True, 4)]


def folder_of_a_run(tmp_path):
    folder = RunFolder(tmp_path / "run", Owner(tmp_path / "run"))
    folder.write_recipe({"name": "run"})
    return folder


def test_only_valid_requests_to_a_run_that_is_training_are_recorded(tmp_path):
    folder = folder_of_a_run(tmp_path)
    wrong: list[tuple[Any, Any]] = [
        ("kill", None), (None, None), (["stop"], None), ("stop", 1), ("samples", None), ("samples", -1), ("samples", True),
        ("samples", 10**9), ("samples", "5"), ("samples", 1.5), ("<b>" * 1_000_000, None),
    ]  # fmt: skip
    for action, value in wrong:
        with pytest.raises(ValueError, match=r"a run can be asked for|takes no value|needs the steps"):
            make_request(folder, action, value, via="test")
    for _ in range(control.MOST_PENDING):
        make_request(folder, "checkpoint", via="test")
    with pytest.raises(ValueError, match="20 requests already wait"):
        make_request(folder, "stop", via="test")
    folder.owner.close()
    with pytest.raises(ValueError, match="is not training"):
        make_request(folder, "stop", via="test")
    assert len(read_requests(folder)) == control.MOST_PENDING


def test_requests_from_before_the_start_are_refused(tmp_path, monkeypatch):
    """An answer that cannot be written is not tried again at every step."""
    folder = folder_of_a_run(tmp_path)
    make_request(folder, "stop", via="test")
    steering = ControlRequests(folder, Ranks(), samples_every=5, step=7)
    (refused,) = read_requests(folder).values()
    assert (refused.taken, refused.step, refused.answer) == (False, 7, "the run was not training")
    assert not steering.wanted(stop=False, last=False)[0]
    make_request(folder, "checkpoint", via="test")
    steering.refuse(9, "the run ended")
    assert [each.answer for each in read_requests(folder).values()] == ["the run was not training", "the run ended"]

    def refuse(*given, **named):
        raise PermissionError(13, "Permission denied")

    make_request(folder, "checkpoint", via="test")
    monkeypatch.setattr("retouch.run.session.answer_request", refuse)
    assert steering.wanted(stop=False, last=False)[1]
    steering.answer(1, last=False)
    assert not steering.wanted(stop=False, last=False)[1]


def test_a_step_without_requests_costs_one_stat(tmp_path, monkeypatch):
    folder = folder_of_a_run(tmp_path)
    steering = ControlRequests(folder, Ranks(), samples_every=5, step=0)
    make_request(folder, "checkpoint", via="test")
    os.utime(folder.control, (1, 1))
    assert steering.wanted(stop=False, last=False)[1]
    steering.answer(1, last=False)
    os.utime(folder.control, (2, 2))
    assert not steering.wanted(stop=False, last=False)[1]
    stats: list[object] = []
    control, whole = folder.control, os.stat
    monkeypatch.setattr(os, "stat", lambda path, *rest, **more: stats.append(path) or whole(path, *rest, **more))
    monkeypatch.setattr(os, "scandir", None)
    monkeypatch.setattr(os, "listdir", None)
    for _ in range(10):
        assert not steering.wanted(stop=False, last=False)[1]
    assert stats == [control] * 10


def test_invalid_request_files_are_ignored(tmp_path):
    folder = folder_of_a_run(tmp_path)
    folder.control.mkdir()
    (folder.control / "1.json").symlink_to(folder.recipe)
    (folder.control / "2.json").mkdir()
    for content in (b"", b"[1]", b'{"action": "kill"}', b"[" * 90_000, b"\0\xff", b'{"action": "stop"}', b"x" * 20_000):
        (folder.control / "0.json").write_bytes(content)
        steering = ControlRequests(folder, Ranks(), samples_every=5, step=0)
        assert steering.wanted(stop=False, last=False) == (False, False)
        assert (folder.control / "0.json").read_bytes() == content


def test_control_command_makes_valid_requests_and_prints_their_status(tmp_path, capsys):
    folder = folder_of_a_run(tmp_path)

    def said(*words, code=0, root=folder.root):
        assert cli.main(["control", str(root), *words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    assert "has no requests; ask for one with: retouch control" in said()
    assert "takes the request at the end of its current step" in said("samples=3")
    assert [(each.action, each.value) for each in read_requests(folder).values()] == [("samples", 3)]
    listed = said()
    assert "samples=3" in listed
    assert "waiting" in listed
    assert "needs the steps" in said("samples=many", code=2)
    assert "not the folder of a run" in said("stop", code=2, root=tmp_path)
    (name,) = read_requests(folder)
    request = ControlRequest(action="samples", value=3, by="somebody", at="2026-01-01T00:00:00+00:00")
    control.answer_request(folder, name, request, taken=False, step=4, answer="this was the last step")
    assert "refused: this was the last step" in said()


class StopsTheRun:
    """A reward that, on rank 0, asks the run to stop while it scores for the ``calls``-th time."""

    columns: Mapping[str, Column] = {"bright": Column(0.0, 1.0)}

    def __init__(self, folder, calls):
        self.folder, self.calls, self.count = RunFolder(Path(folder)), calls, 0

    def __call__(self, samples):
        self.count += 1
        if self.count == self.calls and os.environ.get("RANK") == "0":
            make_request(self.folder, "stop", via="test")
        return {"bright": torch.tensor([sample.image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for sample in samples])}


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step(tmp_path):
    document = six_step_recipe(tmp_path, "ranks").document()
    arguments = {"folder": str(tmp_path / "ranks"), "calls": 6}
    document["reward"] = {"kind": "import", "class": "test_steering:StopsTheRun", "args": arguments, "combine": {"bright": 1}}
    made = parse(document, allow_imports=["test_steering"])
    file = tmp_path / "ranks.json"
    file.write_text(made.model_dump_json())
    command = [python(), "-W", "ignore", "-m", "retouch.cli", "launch", "--nproc", "2", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    (request,) = read_requests(RunFolder(made.folder)).values()
    assert request.taken
    steps = [json.loads(line)["step"] for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    assert request.step == steps[-1] < 6
