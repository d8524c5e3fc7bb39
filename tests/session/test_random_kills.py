"""A reduced number of the faults that `measurements/robustness` injects; the folders: tests/session/test_damaged_folders.py."""

import os
import subprocess
from pathlib import Path

import pytest

from warm_python import python

ROBUSTNESS = Path(__file__).parents[2] / "measurements" / "robustness"


@pytest.mark.slow  # test_resume.py kills at chosen places, with the same comparison
def test_a_run_that_is_killed_at_random_ends_with_the_same_bits() -> None:
    command = [python(), "-W", "ignore", str(ROBUSTNESS / "kills.py"), "--kills", "5", "--cold", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "5 kills (1 of them in a cold start)" in done.stdout
