"""Compiled blocks in a dry run, and the table of what makes Qwen-Image-Edit's Flow-GRPO faster."""

import json
from pathlib import Path

import pytest

from dry_run_scripts import call_in_new_process, script
from retouch.recipe.recipe import load
from retouch_plan.machines import FREE_SHARE
from warm_python import run_python

ROOT = Path(__file__).parents[2]
SPEEDUP = script("speedup")
KEPT: dict[str, dict[str, float]] = json.loads(SPEEDUP.KEPT.read_text(encoding="utf-8"))
FACTOR = 1.8
FUSION = """
import json

import torch
from torch import nn
from retouch_plan.accelerator import Accelerator
from retouch_plan.machines import FREE_SHARE, MACHINES
from retouch_plan.meter import Meter

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, device="dryrun:0")

    def forward(self, x):
        y = self.linear(x)
        return (y * 2 + 1).relu() + x

class Net(nn.Module):
    _repeated_blocks = ["Block"]

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x) * 3

meter = Meter(MACHINES["h100"])
with Accelerator(observe=meter.observe):
    net = Net()
    x = torch.empty(32, 64, device="dryrun:0")
    for name in ("eager", "compiled"):
        if name == "compiled":
            meter.compiled.watch(net)
        with torch.no_grad(), meter.stage(name):
            net(x)
    with meter.stage("complex"), torch.no_grad():
        z = torch.empty(4, 4, device="dryrun:0", dtype=torch.complex64)
        meter.compiled._depth += 1
        z * z
        meter.compiled._depth -= 1
        meter.compiled._on_leave()
size = 32 * 64 * 4
print(json.dumps({name: (stage.work.counts["kernels"], stage.work.counts["bytes"] / size) for name, stage in meter.stages.items()}))
print(meter.stages["compiled"].work.seconds["fused kernels"] * MACHINES["h100"].bandwidth / size)
"""


def test_the_machines_page_contains_the_stored_speedup_table():
    assert SPEEDUP.table(KEPT) in (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert KEPT.keys() == set(SPEEDUP.combinations())


def test_the_changes_make_the_modelled_step_1_8_times_faster_and_it_fits():
    assert KEPT[",".join(SPEEDUP.CHANGES)]["step"] / KEPT[""]["step"] >= FACTOR
    assert KEPT[""]["peak"] <= (1 - FREE_SHARE) * 79.1 * 2**30
    assert load(SPEEDUP.RECIPE).policy.compile == "regional"


def test_elementwise_kernels_of_a_compiled_block_count_as_one():
    """Four of them read the product and x once each and write the sum; outside the block each reads and writes by itself."""
    printed = run_python("-c", FUSION, timeout=300)
    stages, fused = printed.splitlines()
    found = json.loads(stages)
    weight = 64 / 32
    product = 2 + weight
    assert found["eager"] == [6, product + 2 + 2 + 2 + 3 + 2]
    assert found["compiled"] == [3, product + 3 + 2]
    assert found["complex"][0] == 1
    assert float(fused) == 3


@pytest.mark.slow
@pytest.mark.parametrize("names", ["", ",".join(SPEEDUP.CHANGES)])
def test_a_new_dry_run_matches_the_speedup_table(names):
    code = call_in_new_process("speedup", "rehearse_without", names.split(",") if names else [])
    printed = run_python("-c", code, timeout=900)
    assert json.loads(printed.splitlines()[-1]) == pytest.approx(KEPT[names], rel=0.01, abs=0.01)
