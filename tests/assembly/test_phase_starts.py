"""Weight copies at the first step of a phase."""

from pathlib import Path
from typing import Any

import pytest

import retouch
from tiny_recipes import SMALL

IMITATE = {"objective": {"kind": "supervised"}, "group_size": 1}
FAST = {"steps": 2, "learning_rate": 1e-2}
WARM_UP = {"name": "warm_up", **IMITATE, **FAST}
FIRST = {"name": "first", **FAST}
LEARN = {"name": "learn", "steps": 1}


def first_kl(phases: list[dict[str, Any]], folder: Path) -> float:
    """Return the KL divergence from the reference in the first step of the last phase."""
    policy = {key: value for key, value in SMALL["policy"].items() if key != "ema"}
    objective = {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4, "kl": {"kind": "closed", "weight": 0.1}}
    shared = {"out": str(folder), "device": "cpu", "trackers": [], "eval": {"tasks": 2}}
    document = {**SMALL, **shared, "policy": policy, "objective": objective, "phases": phases}
    document.pop("steps")
    *_, last = retouch.Trainer.from_recipe(document, progress=False)
    return last.metrics["policy/kl"]


@pytest.mark.parametrize("skipped", [[], [{"name": "skipped", "steps": 0, "objective": {"kind": "nft"}}]])
def test_reference_is_the_policy_after_a_warm_up_even_if_a_skipped_phase_follows(skipped: list[dict], tmp_path: Path) -> None:
    assert first_kl([WARM_UP, *skipped, LEARN], tmp_path) == 0


@pytest.mark.parametrize("skipped", [[], pytest.param([{"name": "skipped", "steps": 0, **IMITATE}], marks=pytest.mark.slow)])
def test_reference_stays_the_initial_policy_if_the_warm_up_is_skipped(skipped: list[dict], tmp_path: Path) -> None:
    assert first_kl([FIRST, *skipped, LEARN], tmp_path) > 0
