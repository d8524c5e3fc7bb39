"""What a dry run counts for blocks, block inputs and text encoders that wait in CPU memory."""

import json
from pathlib import Path

import pytest

from retouch_plan.models import choose_depths
from warm_python import run_python

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
def test_peaks_fall_by_the_bytes_of_what_waits_in_cpu_memory(tmp_path):
    printed = run_python(SUPPORT / "dry_run_swapping.py", tmp_path / "model", search=[SUPPORT], timeout=1500)
    found = json.loads(printed.splitlines()[-1])
    none, swapped, blocks = found["none"], found["swapped"], found["blocks"]
    assert none["checkpoint"] - swapped["checkpoint"] == pytest.approx(sum(blocks), rel=0.01)
    assert none["update"] - swapped["update"] == pytest.approx(sum(blocks) - 2 * max(blocks), rel=0.05)
    assert found["swapped: seconds"] > 0 == found["none: seconds"]
    assert found["8bit"]["update"] - found["8bit swapped"]["update"] == pytest.approx((sum(blocks) - 2 * max(blocks)) / 2, rel=0.15)
    assert found["live"]["rollout"] > none["rollout"] + 10**9
    assert found["activations"]["update"] < none["update"]


@pytest.mark.parametrize("swapped", [1, 2, 3, 5, 10, 11, 12, 23, 24])
@pytest.mark.parametrize("stacks", [{"dual_attention_layers": 13, "num_layers": 11}, {"num_layers": 24}])
def test_the_swapped_blocks_of_two_depths_extrapolate_to_those_of_the_model(stacks, swapped):
    depths = choose_depths({("transformer", key): count for key, count in stacks.items()}, swap_blocks=swapped)
    one, other = depths.swapped
    assert one + depths.times * (other - one) == swapped
    assert min(one, other) >= min(swapped, 3)
    assert one <= sum(depths.first.values())
