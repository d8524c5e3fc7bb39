"""The preflight: its backup of a run is in CPU memory, and it restores every bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny_policies
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.run import preflight
from tiny_recipes import SMALL
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.slow), "lora"])
def preflight_result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of ``preflight_memory`` on a simulated device."""
    file = tmp_path_factory.mktemp("recipe") / "recipe.json"
    train = {"kind": "full"} if request.param == "full" else SMALL["policy"]["train"]
    policy = {**SMALL["policy"], "train": train}
    file.write_text(json.dumps({**SMALL, "policy": policy}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    done = subprocess.run(
        [python(), str(SUPPORT / "preflight_memory.py"), str(file)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_preflight_keeps_no_copy_of_the_weights_on_the_device(preflight_result: dict[str, Any]) -> None:
    assert preflight_result["trained"] > 10_000
    # A sum and a sum of absolute values of each frozen tensor, in fp64.
    assert preflight_result["during"] - preflight_result["before"] < 0.02 * preflight_result["before"]


def test_preflight_passes_and_restores_every_bit(preflight_result: dict[str, Any]) -> None:
    assert preflight_result["checks"] == dict.fromkeys(("ratio_before", "gradient", "moved", "ratio_after", "frozen"), True)
    assert preflight_result["restored"]


def test_a_resumed_optimizer_has_its_moments_on_the_device(preflight_result: dict[str, Any]) -> None:
    assert preflight_result["moments_on"] == ["pretend:0"]


@pytest.mark.parametrize(
    ("dtype", "objective", "limit"),
    [
        (torch.float32, {"clip_low": 1e-5, "clip_high": 1e-5}, 1e-6),
        (torch.bfloat16, {"clip_low": 1e-5, "clip_high": 2e-5}, 1e-6),
        (torch.bfloat16, {"clip_low": 0.2, "clip_high": 0.2}, 1e-2),
        (torch.bfloat16, {"clip_low": 3e-4, "clip_high": 4e-4, "surrogate": "gspo"}, 3e-5),
    ],
)
def test_ratio_limit_depends_on_dtype_and_clip_range(dtype: torch.dtype, objective: dict[str, Any], limit: float) -> None:
    policy = tiny_policies.policy(train="full")
    minibatch: Any = SimpleNamespace(trajectory=policy.rollout(tiny_policies.batch()))
    policy.module.to(dtype)
    run: Any = SimpleNamespace(policy=policy)
    assert preflight._ratio_limit(run, PolicyGradient(kind="policy_gradient", **objective), minibatch) == pytest.approx(limit)
