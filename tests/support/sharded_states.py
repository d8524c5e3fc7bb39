"""Trains a sharded network, saves a checkpoint, and continues from a checkpoint that any number of ranks saved.

    WORLD_SIZE=N ... python sharded_states.py zero2|fsdp2|alone FOLDER begin|continue float32|bfloat16

``begin`` takes two steps, saves a checkpoint and takes a third step; ``continue`` starts from the checkpoint and takes the third
step. Both write FOLDER/N.safetensors with the weights at the end, and FOLDER/N.json with what rank 0 measured.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from retouch.distributed.fsdp import FsdpStepper, ShardedCopies, shard
from retouch.distributed.optimizer import ReplicatedStepper, Stepper, fill_shards, gathered_state
from retouch.distributed.ranks import Ranks, init_distributed
from retouch.distributed.zero import ZeroStepper
from retouch.policies.weights import WeightCopies
from retouch.run import checkpoint
from retouch.run.checkpoint import TrainState

WIDTH, BLOCKS, ROWS = 1023, 16, 8
STEPPERS: dict[str, Any] = {"fsdp2": FsdpStepper, "zero2": ZeroStepper, "alone": ReplicatedStepper}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3))  # three rows, so a fourth rank gets none

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x) * self.scale.mean()
        return out


class Network(nn.Module):
    """Sixteen blocks of 4 MB."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def memory(line: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(each for each in status.splitlines() if each.startswith(line)).split()[1])


def reset_peak() -> int:
    """Reset the peak of this process's resident memory, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmHWM")


def step(network: nn.Module, stepper: Stepper, ranks: Ranks, number: int) -> None:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    mine = rows.chunk(ranks.world)[ranks.rank]
    output = stepper.module(mine.to(next(network.parameters()).dtype))
    stepper.backward(output.float().square().sum() / (ROWS * WIDTH))
    stepper.step(1e-3)


def main(kind: str, folder: Path, mode: str, dtype: str) -> None:
    ranks = init_distributed("cpu")
    torch.manual_seed(0)
    network = Network().to(getattr(torch, dtype))
    if kind == "fsdp2":
        shard(network, ranks)
    copies = ShardedCopies(network, ranks) if kind == "fsdp2" else WeightCopies(network)
    copies.snapshot("reference")
    stepper: Stepper = STEPPERS[kind](network, ranks)
    found: dict[str, Any] = {}
    if mode == "begin":
        for number in range(2):
            step(network, stepper, ranks, number)
        before = reset_peak()
        weights = gathered_state(copies.parameters, ranks)
        state = TrainState(2, {"weights": weights, "optimizer": stepper.state(), "copies": copies.state()}, {})
        if ranks.is_main:
            checkpoint.save(folder, state)
        else:
            checkpoint.send(state)
        ranks.barrier()
        found["held"] = memory("VmHWM") - before
    else:
        before, mapped = reset_peak(), memory("RssFile")
        loaded = checkpoint.load_latest(folder, groups=("weights", "optimizer", "copies"))
        assert loaded is not None
        for name, parameter in copies.parameters.items():
            fill_shards(parameter, loaded.tensors["weights"][name])
        stepper.load(loaded.tensors["optimizer"])
        copies.load(loaded.tensors["copies"])
        # The kernel maps more of a file than is read, because it maps neighbouring pages too; such pages can be reclaimed.
        found["held"] = memory("VmHWM") - before - (memory("RssFile") - mapped)
        del loaded
    step(network, stepper, ranks, 2)
    found["largest"] = max(weight.numel() * weight.element_size() for weight in network.parameters())
    found["state"] = {file.stem: file.stat().st_size for file in folder.glob("step-*/*.safetensors")}
    masters = {name: tensor for name, tensor in stepper.state().items() if name.endswith("/master")}
    ended = {**dict(gathered_state(copies.parameters, ranks)), **dict(copies.state()), **masters}
    if ranks.is_main:
        save_file(ended, folder / f"{ranks.world}.safetensors")
        (folder / f"{ranks.world}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
