"""The shards of ZeRO-2: which elements of the weights and of the optimizer state a rank has. DeepSpeed is not needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.distributed import zero
from retouch.distributed.optimizer import ReplicatedStepper
from retouch.distributed.ranks import Ranks
from retouch.distributed.zero import ZeroStepper


class Engine:
    """The part of DeepSpeed's engine that holds a rank's shard: fp32 weights, concatenated over all parameters and padded."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
        self._place = rank, world
        (group,) = optimizer.param_groups
        self._weights: list[nn.Parameter] = list(group["params"])
        self._share = self._shard()
        group["params"] = [self._share]
        self.optimizer = SimpleNamespace(
            single_partition_of_fp32_groups=[self._share],
            optimizer=optimizer,
            param_groups=optimizer.param_groups,
            refresh_fp32_params=lambda: self._share.copy_(self._shard()),
        )

    def _shard(self) -> Tensor:
        rank, world = self._place
        flat = torch.cat([weight.detach().float().flatten() for weight in self._weights])
        size = -(-len(flat) // world)
        return nn.functional.pad(flat, (0, size * world - len(flat)))[rank * size : (rank + 1) * size].clone()

    def destroy(self) -> None:
        """It has no hooks."""


def network() -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(5, 3), "idle": nn.Linear(7, 3), "last": nn.Linear(4, 2)}
    return nn.ModuleDict(parts).to(torch.bfloat16)


def shards(monkeypatch: pytest.MonkeyPatch, module: nn.Module, state: dict[str, Tensor], world: int) -> dict[str, Tensor]:
    """Load ``state`` on each of ``world`` ranks, and return what their shards contain together, by key."""
    found: dict[str, list[Tensor]] = {}
    for rank in range(world):

        def initialize(*, optimizer: Any, rank: int = rank, **_: Any) -> tuple[Engine]:
            return (Engine(optimizer, rank, world),)

        library = SimpleNamespace(initialize=initialize)
        monkeypatch.setattr(zero, "_deepspeed", lambda device, library=library: library)
        stepper = ZeroStepper(module, Ranks(rank=rank, world=world))
        stepper.load(state)
        (share,) = stepper.engine.optimizer.single_partition_of_fp32_groups
        kept = stepper.engine.optimizer.optimizer.state[share]
        for key, value in {"master": share, "exp_avg": kept["exp_avg"], "exp_avg_sq": kept["exp_avg_sq"]}.items():
            found.setdefault(key, []).append(value)
    return {key: torch.cat(values) for key, values in found.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_a_weight_without_optimizer_state_keeps_its_value(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """A single rank stores a master weight only for weights that had a gradient."""
    module = network()
    alone = ReplicatedStepper(module, Ranks())
    for _ in range(2):
        outputs = [module[name](torch.ones(width, dtype=torch.bfloat16)) for name, width in (("first", 5), ("last", 4))]
        alone.backward(torch.cat(outputs).float().square().sum())
        alone.step(1e-3)
    state = {name: tensor.clone() for name, tensor in alone.state().items()}
    assert {name.split(".")[0] for name in state} == {"first", "last"}
    assert not torch.equal(state["first.weight/master"], module["first"].weight.float())
    found = shards(monkeypatch, module, state, world)
    for key, content in found.items():
        start = 0
        for name, weight in module.named_parameters():
            empty = weight.detach().float() if key == "master" else torch.zeros(weight.shape)
            wanted = state.get(f"{name}/{key}", empty)
            assert torch.equal(content[start : start + weight.numel()].view(weight.shape), wanted), f"{name}/{key}"
            start += weight.numel()
        assert not content[start:].any(), "padding"
