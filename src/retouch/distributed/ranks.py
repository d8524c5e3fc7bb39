"""What the ranks of a run say to each other. One rank alone needs no process group."""

import atexit
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``world``; collectives that every rank calls in the same order. ``device``: where this rank computes."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """Equal-length rows of every rank, in the order of ranks: (n, ...) to (world * n, ...), on the CPU."""
        if self.world == 1:
            return values.cpu()
        mine = values.to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return torch.cat(parts).cpu()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on the device that ``values`` came from."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The maximum over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """True on every rank where it is true on one."""
        return bool(self.max(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world > 1:
            dist.barrier()

    def _reduced(self, values: Tensor, how: "dist.ReduceOp.RedOpType") -> Tensor:
        if self.world == 1:
            return values
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, op=how)
        return reduced.to(values.device)


def join(device: str) -> Ranks:
    """This process's place among the ranks that accelerate's and torchrun's variables describe, and its device.

    ``device``: ``auto`` takes CUDA, then MPS, then CPU; ``cpu``, ``cuda`` or ``cuda:N`` are taken as said. ValueError where there
    is no such device.
    """
    chosen = find_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(device=chosen)
    state = PartialState(cpu=chosen.type == "cpu")
    atexit.unregister(leave)
    atexit.register(leave)
    return Ranks(rank=state.process_index, world=state.num_processes, device=state.device)


def leave() -> None:
    """End the process group. At the interpreter's own end gloo's threads would still hold tensors, and abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def find_device(device: str) -> torch.device:
    """The device that is said; ``auto`` takes CUDA, then MPS, then CPU. ValueError where it is not there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: no CUDA device is here; set device to auto or cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen
