"""The process group and the collectives of a run's ranks. A single rank needs no process group."""

import atexit
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

TIMEOUT = "RETOUCH_RANK_TIMEOUT"
_RELEASE_SECONDS = 0.2
_LOST = re.compile(
    r"closed by peer|connection reset|timed out waiting|timeout|broken pipe|connect(?:ion)? (?:refused|failed)", re.IGNORECASE
)


@dataclass(frozen=True)
class Ranks:
    """This process is ``rank`` of ``world`` ranks. All ranks must call the collectives in the same order.

    ``device``: the device on which this rank computes. ``stop``: set once this process was asked to stop (by a signal).
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stop: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files that exist once per run."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in rank order: (n, ...) to (world * n, ...), on the CPU. n is equal on all ranks."""
        if self.world == 1:
            return values.cpu()
        mine = values.to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return torch.cat(parts).cpu()

    def parts(self, mine: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """Yield the flat tensor of each rank in turn, with ``counts[rank]`` elements. ``mine``: the tensor of this rank.

        Only one of them is on this rank's device at a time. All ranks must iterate to the end.
        """
        for rank, count in enumerate(counts):
            if self.world == 1 or count == 0:
                yield mine[:count]
                continue
            if rank == self.rank:
                content = mine.detach().to(self.device).contiguous()
            else:
                content = torch.empty(count, dtype=mine.dtype, device=self.device)
            dist.broadcast(content, src=rank)
            yield content
            del content

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, on the device of ``values``."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum over ranks, on the device of ``values``."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """True on all ranks if ``flag`` is true on at least one."""
        return bool(self.max(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        """Wait until all ranks have arrived here."""
        if self.world > 1:
            dist.barrier()

    def _reduced(self, values: Tensor, how: "dist.ReduceOp.RedOpType") -> Tensor:
        if self.world == 1:
            return values
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, op=how)
        return reduced.to(values.device)


def init_distributed(device: str) -> Ranks:
    """Join the process group that the environment variables of the launcher describe, and choose this rank's device.

    ``device``: "auto" chooses CUDA, then MPS, then CPU; "cpu", "cuda" and "cuda:N" are used as given. The environment variable
    ``RETOUCH_RANK_TIMEOUT`` sets the seconds that a rank waits for the others before it fails (torch's default: 30 minutes; with
    NCCL, 10 minutes). Raises ValueError if the device does not exist.
    """
    chosen = find_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(device=chosen)
    from retouch.distributed.launching import STORE

    options: dict[str, Any] = {}
    if (limit := os.environ.get(TIMEOUT)) is not None:
        options["timeout"] = timedelta(seconds=float(limit))
    if (store := os.environ.get(STORE)) is not None:
        options |= {"init_method": f"file://{store}", "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    state = PartialState(cpu=chosen.type == "cpu", **options)
    atexit.unregister(destroy_distributed)
    atexit.register(destroy_distributed)
    return Ranks(rank=state.process_index, world=state.num_processes, device=state.device)


def lost_contact(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank ended, or did not answer within the process group's time limit."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and bool(_LOST.search(str(error)))


def destroy_distributed() -> None:
    """Destroy the process group. Otherwise gloo's threads would still hold tensors at interpreter exit and abort the process.

    After FSDP2, torch keeps references to the group, and its threads stay alive. The thread that releases the tensors of the last
    collective needs the interpreter lock. The sleep gives it time: a thread that waits for the lock at exit aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_RELEASE_SECONDS)


def find_device(device: str) -> torch.device:
    """Return the torch device for ``device``; "auto": CUDA, then MPS, then CPU. Raises ValueError if the device does not exist.

    From then on, this process uses cuDNN's attention only where ``policy.attention`` names it (``_native_cudnn``). Its backward
    pass can access memory illegally (torch 2.11 on an H100), which no code can catch. torch takes FlashAttention instead, or
    memory-efficient attention for masks and fp32.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this machine has no CUDA device; set device to auto or cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def scoring_device() -> str:
    """Return the device of reward models where nothing names one: the first GPU of this process, or the CPU."""
    return str(find_device("cuda" if torch.cuda.is_available() else "cpu"))
