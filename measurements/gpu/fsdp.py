"""FSDP2 on a single rank: compares two steps of a sharded model in bfloat16 with a LoRA to the same model without sharding.

The weights of the sharded model stay on the device, or are kept in CPU memory between uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from cases import SD3_SHORT, Built, build
from findings import Finding, at_most
from target import Target
from torch import Tensor

from retouch.distributed.fsdp import FsdpStepper, shard
from retouch.distributed.optimizer import Stepper

LIMIT = 1e-5
STEPS = 2
NAMES = ("gradient norm, relative difference", "trained weights after two steps, relative difference")
Trained = tuple[list[float], dict[str, Tensor]]


def run(target: Target) -> Iterator[Finding]:
    """Compare gradient norms and trained weights with and without sharding, with deterministic algorithms.

    Two runs without sharding are compared first. Other algorithms sum in any order, and AdamW's first steps are signs, so that a
    difference of 1e-5 in a gradient becomes one of .02 in a weight.
    """
    target.require_memory(20e9)
    with _one_rank(target):
        plain = _train(target, sharded=False)
        floor = _differences(plain, _train(target, sharded=False))
        limits = [max(LIMIT, 2 * each) for each in floor]
        for name, difference in zip(NAMES, floor, strict=True):
            yield at_most(f"{name} of two runs without sharding", difference, LIMIT)
        for waits, how in ((False, ""), (True, ", weights wait in CPU memory")):
            found = _differences(plain, _train(target, sharded=True, weights_on_cpu=waits))
            for name, difference, limit in zip(NAMES, found, limits, strict=True):
                yield at_most(f"{name}{how}", difference, limit)


def _differences(run: Trained, other: Trained) -> tuple[float, float]:
    """The largest relative differences of gradient norms and of trained weights."""
    norms = max(abs(a - b) / a for a, b in zip(run[0], other[0], strict=True))
    assert run[1].keys() == other[1].keys()
    return norms, max(float((weight - other[1][name]).norm() / weight.norm()) for name, weight in run[1].items())


def _train(target: Target, *, sharded: bool, weights_on_cpu: bool = False) -> Trained:
    """The gradient norms of the steps, and the fp32 master weights after them."""
    built = build(SD3_SHORT, target, ["deterministic=true"])
    module, ranks, options = built.parts.model.module, built.parts.ranks, built.recipe.optimizer.options
    stepper: Stepper = built.stepper
    if sharded:
        shard(module, ranks, weights_on_cpu=weights_on_cpu)
        stepper = FsdpStepper(module, ranks, **options)
    norms = [_step(built, stepper, number) for number in range(STEPS)]
    state = stepper.state()
    return norms, {name: state[name].float().cpu() for name in state if name.endswith("/master")}


def _step(built: Built, stepper: Stepper, number: int) -> float:
    model, batch = built.parts.model, built.phase.batch(0)
    conditioning = model.encode(batch.tasks)
    noise = model.initial_noise(conditioning, [torch.Generator().manual_seed(number)])
    sigma = torch.full((1,), 0.5, device=noise.device)
    stepper.backward(model.velocity(model.module, noise, sigma, conditioning).square().mean())
    return stepper.step(1e-3)


@contextmanager
def _one_rank(target: Target) -> Iterator[None]:
    """Open a process group that contains only this process."""
    backend, method = "nccl" if target.is_cuda else "gloo", f"file://{target.scratch / 'ranks'}"
    dist.init_process_group(backend, init_method=method, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
