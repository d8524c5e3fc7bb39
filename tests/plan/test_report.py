"""The text report of a dry run, and the times of copies between host and device."""

import json
from collections import Counter
from typing import Any

import torch

from retouch_plan.dry_run import DryPhase, DryRun
from retouch_plan.estimate import lines
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Stage, Work
from warm_python import run_python

GB = 10**9
PROGRAM = """
import json
import torch
from retouch_plan.accelerator import Accelerator, register
from retouch_plan.accelerator import DEVICE
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Meter

register()
meter = Meter(MACHINES["h100"])
with Accelerator(observe=meter.observe, on_read=meter.wait, is_weight=meter.is_weight):
    source = torch.zeros(10**7)
    for name, without_blocking in (("pageable", False), ("page-locked", True)):
        with meter.stage(name):
            source.to(torch.device(DEVICE, 0), non_blocking=without_blocking)
stages = {name: stage.work for name, stage in meter.stages.items() if stage.work.counts["copied"]}
print(json.dumps({name: [work.seconds.total(), sum(work.waits.values())] for name, work in stages.items()}))
"""


def test_a_copy_from_page_locked_memory_has_its_own_rate_and_no_wait():
    printed = run_python("-c", PROGRAM, timeout=120)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    machine, size = MACHINES["h100"], 4 * 10**7
    assert found == {"pageable": [size / machine.copy, 1], "page-locked": [size / machine.pinned_copy, 0]}
    assert machine.pinned_copy > 2 * machine.copy


def test_the_report_names_the_largest_tensors_of_every_stage():
    report = "\n".join(lines(dry_run(), MACHINES["h100"]))
    assert "memory: at most 30.00 GB on device 0, in update: fits" in report
    assert "  rollout                 20.00 GB weights: transformer, 3.00 GB latents, 2.00 GB text embeddings\n" in report
    assert "16-bit matrix products and device copies measured on one GPU of this kind" in report


def dry_run():
    rollout = stage({"weights: transformer": 20, "latents": 3, "text embeddings": 2, "noise": 1})
    update = stage({"weights: transformer": 20, "activations": 10})
    phase = DryPhase(name="", steps=2, rows=4, stages=("rollout", "update"))
    return DryRun(
        stages={"rollout": rollout, "update": update}, world=1, phases=(phase,), evaluations=0, checkpoint=GB, host_peak=GB,
        units={},
    )  # fmt: skip


def stage(held):
    sizes = Counter({name: size * GB for name, size in held.items()})
    event = torch.ops.aten.mm.default, GB, False
    return Stage(work=Work(counts=Counter(kernels=1)), most={(0, event): (sizes.total(), sizes)})
