"""Two processes never train in one run folder, whichever command started them."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kill_places import recipe
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder
from retouch.records.ownership import NotOwner, Owner
from retouch.run.session import run

COMMAND = [sys.executable, "-W", "ignore", "-m", "retouch.cli"]


def long_run(tmp_path: Path) -> Recipe:
    made = recipe(tmp_path, "run", None)
    return made.model_copy(update={"steps": 400})


@contextmanager
def training(made: Recipe, tmp_path: Path, *launch: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that trains the recipe, once it has taken two steps."""
    file = tmp_path / "recipe.json"
    file.write_text(made.model_dump_json())
    command = [*COMMAND, *(launch or ("train",)), str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            for _ in range(1200):
                if len(RunFolder(made.folder).read_metrics()) >= 2:
                    break
                assert process.poll() is None, process.stderr.read().decode()[-2000:]  # type: ignore[union-attr]
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def test_a_second_process_is_refused_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    made = long_run(tmp_path)
    with training(made, tmp_path) as first:
        for fresh in (False, True):
            with pytest.raises(NotOwner, match=f"in use by process {first.pid}"):
                run(made, fresh=fresh)
        done = subprocess.run([*COMMAND, "train", str(tmp_path / "recipe.json"), "--fresh"], capture_output=True, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    steps = [line["step"] for line in RunFolder(made.folder).read_metrics()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_run_whose_folder_is_moved_stops_and_writes_nothing_more(tmp_path: Path) -> None:
    made = long_run(tmp_path)
    with training(made, tmp_path) as first:
        made.folder.rename(tmp_path / "moved")
        assert first.wait(60) == 2
        assert first.stderr is not None
        said = first.stderr.read().decode()
    assert "the run folder was moved or deleted" in said
    assert "Traceback" not in said
    assert not made.folder.exists()


@pytest.mark.slow
def test_ranks_of_a_killed_launcher_end_and_release_the_run_folder(tmp_path: Path) -> None:
    made = long_run(tmp_path)
    with training(made, tmp_path, "launch", "--nproc", "2") as first:
        first.kill()
        first.wait()
        end = time.monotonic() + 20
        while True:
            try:
                Owner(made.folder).close()
                break
            except NotOwner:
                assert time.monotonic() < end, "the ranks outlived their launcher"
                time.sleep(0.05)
    before = len(RunFolder(made.folder).read_metrics())
    time.sleep(2)
    assert len(RunFolder(made.folder).read_metrics()) == before
