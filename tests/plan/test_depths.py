"""Dry runs at two small depths, extrapolated, give the same figures as a dry run at full depth."""

import json
from pathlib import Path

import pytest

from retouch_plan.models import FEWEST, choose_depths, with_blocks
from warm_python import run_python

SUPPORT = Path(__file__).parents[1] / "support"
AGREEMENT = 0.005
STACKS = [
    {"transformer": 60}, {"transformer": 60, "text_encoder": 28, "writer": 28}, {"double": 19, "single": 38},
    {"dual": 13, "plain": 11}, {"double": 5, "single": 20},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "update"), [("qwen-image-edit/flow-grpo", "update"), ("flux-fill/ip-adapter-grpo", "rl: update")])
def test_two_depths_agree_with_full_depth(tmp_path, name, update):
    printed = run_python(SUPPORT / "dry_run_depths.py", tmp_path / "model", name, search=[SUPPORT], timeout=800)
    found = json.loads(printed.splitlines()[-1])
    assert found["two"].keys() == found["full"].keys()
    for kind, figures in found["full"].items():
        assert found["two"][kind] == pytest.approx(figures, rel=AGREEMENT), kind
    assert found["full"]["flops"][update] > 1e15
    assert found["parallel"] == found["two"]


@pytest.mark.parametrize("stacks", STACKS)
def test_the_two_depths_extrapolate_linearly_to_the_full_depth(stacks):
    depths = choose_depths({(name, "num_layers"): count for name, count in stacks.items()})
    for stack, first in depths.first.items():
        step = depths.second[stack] - first
        assert first + step * depths.times == stacks[stack[0]]
        assert first >= FEWEST
    assert sum(depths.first.values()) + sum(depths.second.values()) < sum(stacks.values())


def test_a_small_model_has_a_dry_run_at_full_depth():
    assert choose_depths({("transformer", "num_layers"): 4}) is None
    assert choose_depths({}) is None


def test_blocks_with_a_second_attention_come_first():
    config = {"num_layers": 24, "dual_attention_layers": list(range(13)), "width": 1}
    made = with_blocks(config, {"num_layers": 2, "dual_attention_layers": 4})
    assert made == {"num_layers": 6, "dual_attention_layers": [0, 1, 2, 3], "width": 1}
