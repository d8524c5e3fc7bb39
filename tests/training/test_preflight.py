"""The trial step: what it keeps of a run is in CPU memory, and it restores every bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_recipes import SMALL

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module", params=["full", "lora"])
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``preflight_memory`` found on a simulated device."""
    file = tmp_path_factory.mktemp("recipe") / "recipe.json"
    train = {"kind": "full"} if request.param == "full" else SMALL["policy"]["train"]
    policy = {**SMALL["policy"], "train": train}
    file.write_text(json.dumps({**SMALL, "policy": policy}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "preflight_memory.py"), str(file)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_trial_step_keeps_nothing_on_the_device(tried: dict[str, Any]) -> None:
    assert tried["trained"] > 10_000
    # A sum and a sum of absolute values of each frozen tensor, in fp64.
    assert tried["during"] - tried["before"] < 0.02 * tried["before"]


def test_the_trial_step_passes_and_restores_every_bit(tried: dict[str, Any]) -> None:
    assert tried["checks"] == dict.fromkeys(("ratio_before", "gradient", "moved", "ratio_after", "frozen"), True)
    assert tried["restored"]


def test_a_resumed_optimizer_has_its_moments_on_the_device(tried: dict[str, Any]) -> None:
    assert tried["moments_on"] == ["pretend:0"]
