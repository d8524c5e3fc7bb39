"""A run that is killed anywhere and started again ends bitwise equal to an uninterrupted run."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import tiny_writer_runs
from warm_python import python

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
MODELS = {"writer": tiny_writer_runs.save_writer, "emu3": tiny_writer_runs.save_emu3}


def killed_and_resumed(out, count, *more, program="kill_places.py"):
    """Each of ``count`` kills, which all happened: a place that was never reached proves nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python(), "-W", "ignore", str(SUPPORT / program), str(out), str(count), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [place["ended"] for place in found] == [-signal.SIGKILL] * count
    assert [place for place in found if place["differing"]] == []
    return found


def check(found, done=None):
    """``done``: the steps that each run had made when it was killed."""
    assert [place for place in found if place["resumed"] != 0] == []
    assert done is None or [place["done"] for place in found] == done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "count", "done"),
    [
        ("phases", 1, [1]), ("phases", 8, [1, 0, 2, 2, 2, 2, 3, 2]), ("stale", 1, [2]), ("refill", 2, None), ("writer", 1, None),
        ("writer", 22, None), ("emu3", 1, None), ("emu3", 3, None), ("", 2, None), ("", 22, None),
    ],
)  # fmt: skip
def test_run_killed_at_several_places_resumes_bitwise(what, count, done, tmp_path):
    if what in MODELS:
        MODELS[what](tmp_path / what)
        what = str(tmp_path / what)
    check(killed_and_resumed(tmp_path, count, *[what] * bool(what)), done)


@pytest.mark.slow
def test_run_with_staleness_killed_at_three_places_resumes_bitwise(tmp_path):
    check(killed_and_resumed(tmp_path, 3, "stale"), [2, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_run_with_a_random_judge_resumes_with_the_scores_of_its_ledger(count, tmp_path):
    """The results equal bitwise those of an uninterrupted run with the same scores; no score in the ledger is requested again."""
    found = killed_and_resumed(tmp_path, count, program="kill_random_judge.py")
    assert [place for place in found if place["resumed"] != [0, 0] or place["asked_again"]] == []
    assert any(place["held"] for place in found)


@pytest.mark.slow  # the tests above kill at chosen places, with the same comparison
def test_a_run_that_is_killed_at_random_ends_with_the_same_bits():
    command = [python(), "-W", "ignore", str(ROOT / "measurements/robustness/kills.py"), "--kills", "5", "--cold", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "5 kills (1 of them in a cold start)" in done.stdout
