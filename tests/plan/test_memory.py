"""The memory that a dry run counts, compared with torch's profiler on the CPU, and the weights of reward models."""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from measured_memory import measured_peak
from retouch.models import quantized
from retouch.recipe.recipe import load
from retouch_plan import estimate
from retouch_plan.dry_run import DryRun, holders, largest, reward_weights, uncounted_rewards
from retouch_plan.machines import FREE_SHARE, MACHINES, fits
from retouch_plan.meter import Stage
from retouch_plan.models import QuantizedLinear
from warm_python import run_python

GB = 10**9
ENHANCER = "recipes/sd3/prompt-enhancer.jsonnet"
COUNTED = """
import json, sys
import torch
from torch import nn
from retouch_plan.accelerator import Accelerator, register
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Meter
import test_memory

register()
meter = Meter(MACHINES["h100"])
with Accelerator(observe=meter.observe, on_read=meter.wait, is_weight=meter.is_weight):
    found = {}
    for name, compute in test_memory.COMPUTATIONS.items():
        run = compute("dryrun:0")
        with meter.stage(f"before {name}"):
            torch.empty(0, device="dryrun:0")
        before = meter._sizes[0]
        with meter.stage(name):
            run()
        found[name] = meter.stages[name].peak - before
print(json.dumps(found))
"""


def _train(device):
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)).to(device)
    x = torch.randn(512, 64).to(device)

    def step():
        net(x).sum().backward()
        net.zero_grad(set_to_none=True)

    return step


def _free(device):
    def allocate():
        for _ in range(5):
            tensor = torch.zeros(1024, device=device)
            tensor.view(8, 128).T[3:]
            del tensor

    return allocate


def _quantized(bits, device):
    """A training step through two quantised layers; on the CPU with the real libraries."""
    layers = [nn.Linear(1024, 2048), nn.Linear(2048, 1024)]
    place = torch.device(device)
    if place.type == "cpu":
        net = nn.Sequential(*(quantized.quantized_layer(layer, bits, device=place) for layer in layers))
    else:
        net = nn.Sequential(*(QuantizedLinear(layer.to(place), bits, device=place) for layer in layers))
    x = torch.randn(512, 1024).to(device).requires_grad_()
    return lambda: net(x).sum().backward(inputs=[x])


COMPUTATIONS = {
    "training": _train,
    "freed tensors and views": _free,
    **{bits: partial(_quantized, bits) for bits in ("8bit", "4bit")},
}


@pytest.fixture(scope="module")
def counted():
    """The peaks of the computations in a process with a fake accelerator."""
    printed = run_python("-c", COUNTED, search=[Path(__file__).parent, Path(__file__).parents[1] / "support"], timeout=300)
    found: dict[str, int] = json.loads(printed.splitlines()[-1])
    return found


def test_the_peak_of_a_training_step_equals_that_of_the_profiler_up_to_rounding_of_blocks(counted):
    """A device's allocator rounds each tensor up to 512 bytes; the step has fewer than 20 small tensors."""
    run = _train("cpu")
    run()
    measured = measured_peak(run)
    assert measured <= counted["training"] <= measured + 20 * 512


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_the_peak_of_a_step_through_quantised_layers_is_counted_within_3_percent(counted, bits):
    pytest.importorskip({"8bit": "torchao", "4bit": "bitsandbytes"}[bits])
    measured = measured_peak(_quantized(bits, "cpu"))
    assert counted[bits] == pytest.approx(measured, rel=0.03)


def test_freed_tensors_are_not_counted_and_views_are_not_counted_twice(counted):
    assert counted["freed tensors and views"] == 4096 == measured_peak(_free("cpu"))


# Reward models


def dry_run(**rewards):
    """A step that needs 30 GB on device 0 in its update, and reward models on the devices with these numbers."""
    held = Counter({"weights: transformer": 20 * GB, "activations": 10 * GB, "other": 0})
    update = Stage(most={(0, ("mm", GB, False)): (held.total(), held)})
    weights = {int(name.removeprefix("device")): Counter({"weights: reward x": size}) for name, size in rewards.items()}
    return DryRun(
        stages={"update": update}, world=1, phases=(), evaluations=1, checkpoint=GB, host_peak=2 * GB, units={}, rewards=weights
    )


def test_weights_of_reward_models_are_added_on_their_device():
    assert largest(dry_run())[2] == 30 * GB
    assert largest(dry_run(device0=4 * GB)) == ("update", 0, 34 * GB)
    assert dict(holders(dry_run(device0=4 * GB), "update", 0))["weights: reward x"] == 4 * GB
    separate = dry_run(device1=40 * GB)
    assert largest(separate) == ("rewards", 1, 40 * GB)
    assert (largest(separate, 0)[2], largest(separate, 1)[2]) == (30 * GB, 40 * GB)


@pytest.mark.parametrize(
    ("changes", "devices"),
    [((), {2: 0.61}), (("devices=null",), {0: 0.61}), (("devices.reward=cpu",), {}), (("devices.reward=null",), {0: 0.61})],
)
def test_weights_of_a_clip_reward_are_on_the_device_of_the_recipe(changes, devices):
    found = reward_weights(load(ENHANCER, changes))
    assert {device: weights.total() / 1e9 for device, weights in found.items()} == pytest.approx(devices, abs=0.01)


@pytest.mark.parametrize(
    ("reward", "size"),
    [
        ({"kind": "hpsv3"}, 15.49),
        ({"kind": "editreward", "quantize": "8bit"}, 0.6 * 15.49),
        (
            {
                "kind": "edit_caption",
                "judge": {"kind": "in_process", "path": "Qwen/Qwen2.5-VL-7B-Instruct"},
                "of": {"kind": "hpsv3"},
            },
            32.07,
        ),
    ],
    ids=["hpsv3", "editreward", "edit_caption"],
)
def test_weights_of_large_reward_models_are_counted_without_their_weights(reward, size):
    editor = "recipes/flux-kontext/photos.jsonnet"
    more = load(editor, [f"reward.rewards.taste={json.dumps(reward)}"])
    (before, after) = (sum(weights.total() for weights in reward_weights(recipe).values()) for recipe in (load(editor), more))
    assert (after - before) / 1e9 == pytest.approx(size, abs=0.02)


def test_reward_models_without_a_known_configuration_are_named():
    recipe = load(ENHANCER, ['reward.rewards.taste={"kind": "pickscore", "path": "some/unknown"}'])
    assert uncounted_rewards(recipe) == ["some/unknown"]
    assert uncounted_rewards(load(ENHANCER)) == []


# The doctor's finding


def memory(found, name, monkeypatch, changes):
    monkeypatch.setattr(estimate, "smallest_changes", lambda *_, **__: None if changes is None else (changes, 1))
    return estimate.memory_of(load(ENHANCER), MACHINES[name], found, world=2)


def test_a_step_fits_if_a_tenth_of_the_memory_stays_free(monkeypatch):
    memory_of_gpu = MACHINES["a100-40gb"].memory
    assert fits(int((1 - FREE_SHARE) * memory_of_gpu), memory_of_gpu)
    assert not fits(int((1 - FREE_SHARE) * memory_of_gpu) + 1, memory_of_gpu)
    found = memory(dry_run(device1=GB), "a100-40gb", monkeypatch, None)
    assert found.status == "ok"
    assert found.text.splitlines() == [
        "needs 30.00 GB of the 42.31 GB of a100-40gb on each of 2 ranks, in update:",
        "     20.00 GB  weights: transformer",
        "     10.00 GB  activations",
        "cuda:1: needs 1.00 GB",
        "CPU memory of each rank: 2.00 GB",
    ]


@pytest.mark.parametrize(
    ("size", "changes", "fix"),
    [
        (30, ("microbatch=1", "devices.offload=true"), "--set microbatch=1 --set devices.offload=true"),
        (30, None, "--device 5090"), (50, None, "--device h100"), (500, None, "use more ranks, and sharding fsdp2"),
    ],
)  # fmt: skip
def test_the_fix_of_a_step_that_does_not_fit(size, changes, fix, monkeypatch):
    found = memory(dry_run(device0=(size - 30) * GB), "4090", monkeypatch, changes)
    assert (found.status, found.fix) == ("FAILED", fix)
    assert found.text.startswith(f"does not fit: needs {size}.00 GB of the 25.34 GB of 4090 on each of 2 ranks, in update")


def test_models_without_a_dry_run_are_a_note():
    recipe = load(ENHANCER, ['policy.model={"kind": "import", "class": "mine:Model"}', 'policy.train.targets=["to_q"]'])
    findings, checkpoint = estimate.check_dry_run(recipe, MACHINES["h100"], world=1, timed=True, price=None, calls=[])
    assert checkpoint is None
    (found,) = findings
    assert (found.status, found.subject) == ("note", "memory")
    assert found.text.startswith("not known: mine:Model is no model of this package")
