"""A run that is killed anywhere and started again ends bitwise equal to an uninterrupted run."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import tiny_writer_runs
from warm_python import python

PROGRAM = Path(__file__).parents[1] / "support" / "kill_places.py"
RANDOM_JUDGE_PROGRAM = Path(__file__).parents[1] / "support" / "kill_random_judge.py"


def killed_and_resumed(out: Path, count: int, *more: str, program: Path = PROGRAM) -> list[dict[str, object]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python(), "-W", "ignore", str(program), str(out), str(count), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PROGRAM.parents[2], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, object]], count: int) -> None:
    assert len(found) == count
    assert [place for place in found if place["ended"] != -signal.SIGKILL] == [], "a place that was never reached proves nothing"
    assert [place for place in found if place["resumed"] != 0] == []
    assert [place for place in found if place["differing"]] == []


def test_run_killed_at_two_places_resumes_bitwise(tmp_path: Path) -> None:
    check(killed_and_resumed(tmp_path, 2), 2)


@pytest.mark.slow
def test_run_killed_in_a_warm_up_phase_resumes_bitwise(tmp_path: Path) -> None:
    found = killed_and_resumed(tmp_path, 1, "phases")
    check(found, 1)
    assert [place["done"] for place in found] == [1]


@pytest.mark.slow
def test_run_with_staleness_killed_at_one_place_resumes_bitwise(tmp_path: Path) -> None:
    found = killed_and_resumed(tmp_path, 1, "stale")
    check(found, 1)
    assert [place["done"] for place in found] == [2]


@pytest.mark.slow
def test_run_with_staleness_killed_at_three_places_resumes_bitwise(tmp_path: Path) -> None:
    found = killed_and_resumed(tmp_path, 3, "stale")
    check(found, 3)
    assert [place["done"] for place in found] == [2, 0, 2]


@pytest.mark.slow
def test_run_with_refill_killed_at_two_places_resumes_bitwise(tmp_path: Path) -> None:
    check(killed_and_resumed(tmp_path, 2, "refill"), 2)


@pytest.mark.slow
def test_writer_run_killed_at_one_place_resumes_bitwise(tmp_path: Path) -> None:
    tiny_writer_runs.save_writer(tmp_path / "writer")
    check(killed_and_resumed(tmp_path, 1, str(tmp_path / "writer")), 1)


def test_image_token_run_killed_at_one_place_resumes_bitwise(tmp_path: Path) -> None:
    tiny_writer_runs.save_emu3(tmp_path / "emu3")
    check(killed_and_resumed(tmp_path, 1, str(tmp_path / "emu3")), 1)


@pytest.mark.slow
def test_image_token_run_killed_at_three_places_resumes_bitwise(tmp_path: Path) -> None:
    tiny_writer_runs.save_emu3(tmp_path / "emu3")
    check(killed_and_resumed(tmp_path, 3, str(tmp_path / "emu3")), 3)


def check_random_judge(found: list[dict[str, object]], count: int) -> None:
    """The results equal bitwise those of an uninterrupted run with the same scores; no score in the ledger is requested again."""
    assert len(found) == count
    assert [place for place in found if place["ended"] != -signal.SIGKILL] == [], "a place that was never reached proves nothing"
    assert [place for place in found if place["resumed"] != [0, 0]] == []
    assert any(place["held"] for place in found)
    assert [place for place in found if place["asked_again"] or place["differing"]] == []


@pytest.mark.slow
def test_run_with_a_random_judge_killed_at_two_places_resumes_bitwise(tmp_path: Path) -> None:
    check_random_judge(killed_and_resumed(tmp_path, 2, program=RANDOM_JUDGE_PROGRAM), 2)


@pytest.mark.slow
def test_run_with_a_random_judge_killed_at_eight_places_resumes_bitwise(tmp_path: Path) -> None:
    check_random_judge(killed_and_resumed(tmp_path, 8, program=RANDOM_JUDGE_PROGRAM), 8)


@pytest.mark.slow
def test_writer_run_killed_at_22_places_resumes_bitwise(tmp_path: Path) -> None:
    tiny_writer_runs.save_writer(tmp_path / "writer")
    check(killed_and_resumed(tmp_path, 22, str(tmp_path / "writer")), 22)


@pytest.mark.slow
def test_run_with_phases_killed_at_eight_places_resumes_bitwise(tmp_path: Path) -> None:
    found = killed_and_resumed(tmp_path, 8, "phases")
    check(found, 8)
    assert [place["done"] for place in found] == [1, 0, 2, 2, 2, 2, 3, 2]


@pytest.mark.slow
def test_run_killed_at_22_places_resumes_bitwise(tmp_path: Path) -> None:
    check(killed_and_resumed(tmp_path, 22), 22)
