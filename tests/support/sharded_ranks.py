"""Compares two steppers with the same gradients on two ranks: a replicated stepper, and one that shards.

    WORLD_SIZE=2 ... python sharded_ranks.py zero2|fsdp2|fsdp2-moments|fsdp2-weights lora|full OUT

Each rank writes OUT/rank-N.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import tiny_writers
import tiny_writing
from retouch.distributed.fsdp import FsdpStepper, ShardedCopies, shard
from retouch.distributed.optimizer import NonFiniteGradient, ReplicatedStepper, Stepper, fill_shards
from retouch.distributed.ranks import Ranks, init_distributed
from retouch.distributed.zero import ZeroStepper
from retouch.policies.weights import WeightCopies
from retouch.types import Needs

SETTINGS: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": 0.01, "max_grad_norm": 0.05}


class TrainedWriter:
    """A tiny writer with a stepper, and the loss of its own completions."""

    def __init__(self, kind: str, ranks: Ranks, train: str) -> None:
        self.ranks = ranks
        model = tiny_writers.writer("qwen2.5-vl", train=train, stop=tiny_writing.STOPS)
        if kind.startswith("fsdp2"):
            shard(model.module, ranks, weights_on_cpu=kind == "fsdp2-weights")
        self.copies = ShardedCopies(model.module, ranks) if kind.startswith("fsdp2") else WeightCopies(model.module)
        self.copies.snapshot("reference")
        self.policy = tiny_writing.policy(writer=model, train="full", copies=(), any_rank=ranks.any, sharded=True)
        self.policy.copies = self.copies
        steppers = {"replicated": ReplicatedStepper, "zero2": ZeroStepper, "fsdp2": FsdpStepper}
        # Offloaded weights are stepped by the fused kernel, which on a GPU steps all weights.
        more = {"fsdp2-moments": {"moments": "cpu"}, "fsdp2-weights": {"fused": True}}
        self.settings = {**SETTINGS, **more.get(kind, {})}
        self.stepper: Stepper = steppers[kind.partition("-")[0]](model.module, ranks, **self.settings)

    def step(self, number: int, *, with_nan: bool = False) -> float:
        """Take a step on new completions, with different rows per rank and several backward passes; return the gradient norm."""
        batch = tiny_writing.batch(seed=self.ranks.rank, step=number)
        trajectory = self.policy.rollout(batch)
        for part in self.policy.microbatches(trajectory):
            made = self.policy.evaluate(trajectory, part, Needs(kl="k3"))
            loss = made.log_probs.sum() * 0.1 + made.kl.sum()
            self.stepper.backward(loss * (torch.nan if with_nan and self.ranks.rank == 1 else 1.0))
        return self.stepper.step(0.01)

    @property
    def weights(self) -> dict[str, Tensor]:
        weights = {name: parameter.detach() for name, parameter in self.copies.parameters.items()}
        return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in weights.items()}

    def continue_from(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            fill_shards(self.copies.parameters[name], tensor)
        self.stepper.load(state)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def main(kind: str, ranks: Ranks, train: str) -> dict[str, Any]:
    plain, shared = TrainedWriter("replicated", ranks, train), TrainedWriter(kind, ranks, train)
    begun = shared.weights
    found: dict[str, Any] = {"begun_apart": distance(plain.weights, begun), "empty_state": dict(shared.stepper.state())}
    found["norms"] = [[plain.step(number), shared.step(number)] for number in range(3)]
    found["distance"] = distance(plain.weights, shared.weights)
    found["moved"] = distance(begun, shared.weights)
    states = dict(plain.stepper.state()), dict(shared.stepper.state())
    found["same_state_names"] = states[0].keys() == {name for name in states[1] if not name.endswith("/master")}
    found["state_apart"] = distance(states[0], {name: states[1][name] for name in states[0]})

    # A NaN loss on one rank raises on both ranks and changes nothing.
    before = shared.weights
    try:
        shared.step(3, with_nan=True)
        found["refused"] = False
    except NonFiniteGradient:
        found["refused"] = True
    found["untouched"] = distance(before, shared.weights) == 0 == distance(states[1], shared.stepper.state())

    # A step is undone with the snapshot that each rank keeps of its own state.
    weights, undo = shared.weights, shared.stepper.snapshot()
    shared.step(3)
    found["stepped"] = distance(states[1], shared.stepper.state()) > 0
    for name, tensor in weights.items():
        fill_shards(shared.copies.parameters[name], tensor)
    undo()
    found["undone"] = distance(states[1], shared.stepper.state()) == 0

    # Another stepper that loads this state takes bitwise the same step, also on a module that had a stepper before.
    again = TrainedWriter(kind, ranks, train)
    again.step(0)
    again.continue_from(shared.weights, shared.stepper.state())
    norms = [trained.step(4) for trained in (shared, again)]
    found["resumed"] = norms[0] == norms[1] and distance(shared.weights, again.weights) == 0
    renewed = type(again.stepper)(again.stepper.module, ranks, **again.settings)
    renewed.load(again.stepper.state())
    again.stepper = renewed
    norms = [trained.step(5) for trained in (shared, again)]
    found["renewed"] = norms[0] == norms[1] and distance(shared.weights, again.weights) == 0

    # The replicated stepper continues from the state of the sharding stepper.
    plain.continue_from(
        shared.weights, {name: value for name, value in shared.stepper.state().items() if not name.endswith("/master")}
    )
    norms = [trained.step(6) for trained in (shared, plain)]
    found["handed_over"] = [*norms, distance(shared.weights, plain.weights)]

    # Copies of the weights are swapped in and out again without changing the weights.
    now = shared.weights
    with shared.copies.using("reference"):
        found["reference_apart"] = distance(begun, shared.weights)
    found["swapped_back"] = distance(now, shared.weights) == 0
    shared.copies.update_ema("reference", 0.25)
    wanted = {name: 0.25 * begun[name] + 0.75 * now[name] for name in now}
    found["blend_apart"] = distance(wanted, {name.partition("/")[2]: tensor for name, tensor in shared.copies.state().items()})
    return found


if __name__ == "__main__":
    ranks = init_distributed("cpu")
    made = main(sys.argv[1], ranks, sys.argv[2])
    (Path(sys.argv[3]) / f"rank-{ranks.rank}.json").write_text(json.dumps(made))
