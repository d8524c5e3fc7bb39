"""The device on which the checks measure: its timers and its peak memory."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from findings import NotRun
from torch.utils._python_dispatch import TorchDispatchMode

from retouch.distributed.ranks import find_device

PUBLISHED_FLOPS = {"h100": 989.4e12, "h200": 989.4e12, "a100-80gb": 312e12, "a100-40gb": 312e12}
"""Dense FLOP/s in bfloat16 from NVIDIA's data sheets (SXM); an MFU is a share of them."""


class _HostReads(TorchDispatchMode):
    """Counts the operations that read a value, or a number of elements, for which the host waits on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Target:
    """The device and the folders of a check.

    ``tiny``: whether this is a dry run, with tiny models. ``folder``: for the results. ``scratch``: for files that are removed
    after the check.
    """

    device: torch.device
    tiny: bool
    folder: Path
    scratch: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def memory(self) -> int:
        """Bytes of memory of the GPU; 0 on another device."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.is_cuda else 0

    @property
    def machine(self) -> str:
        """The name of the most similar machine that rehearsals know."""
        name = torch.cuda.get_device_name(self.device).lower() if self.is_cuda else "h100"
        if "a100" in name:
            return "a100-80gb" if self.memory > 60e9 else "a100-40gb"
        return next((known for known in ("h200", "h100", "l40s", "5090", "4090") if known in name), "h100")

    def require_memory(self, size: float) -> None:
        """Raise NotRun if the GPU has less than ``size`` bytes of memory, except in a dry run."""
        if not self.tiny and self.memory < size:
            raise NotRun(f"it needs a GPU with {size / 1e9:.0f} GB, and this one has {self.memory / 1e9:.0f} GB")

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The largest number of bytes of tensors since ``reset_peak``; 0 if the device is not a GPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    def elapsed(self, call: Callable[[], Any]) -> float:
        """Seconds that a call takes, until the GPU has finished."""
        self.synchronize()
        started = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - started

    def waits(self, call: Callable[[], Any]) -> int:
        """How often the host waits for the GPU during a call. On another device, the operations are counted that wait for a GPU."""
        if not self.is_cuda:
            with _HostReads() as reads:
                call()
            return reads.count
        self.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(each.message) for each in caught)

    def kernels(self, call: Callable[[], Any]) -> int:
        """How many kernels the GPU runs in a call. On another device, the operations of torch are counted."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        kind = DeviceType.CUDA if self.is_cuda else DeviceType.CPU
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_cuda else [])]) as profiled:
            call()
            self.synchronize()
        return sum(event.device_type == kind for event in profiled.events())

    def seconds(self, call: Callable[[], Any], *, repeats: int = 10, rounds: int = 3) -> float:
        """Seconds of a short call: the mean of repeated calls, and the median of the rounds. On a GPU, CUDA events measure them."""
        for _ in range(2):
            call()
        return statistics.median(self._round(call, repeats) for _ in range(rounds))

    def _round(self, call: Callable[[], Any], repeats: int) -> float:
        if not self.is_cuda:
            return self.elapsed(lambda: [call() for _ in range(repeats)]) / repeats
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3 / repeats


@dataclass
class StageClock:
    """The clock of a run: for each stage, the sum of the seconds and the largest peak (bytes) of its calls.

    Each call is measured until the GPU has finished.
    """

    target: Target
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.target.synchronize()
        self.target.reset_peak()
        started = time.perf_counter()
        yield
        self.target.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        self.peaks[stage] = max(self.peaks.get(stage, 0), self.target.peak())

    def clear(self) -> None:
        """Delete all measurements."""
        self.seconds.clear()
        self.peaks.clear()


def open_target(folder: Path, *, scratch: Path, dry_run: bool) -> Target:
    """Return this machine's first GPU, or its CPU for a dry run. Raises NotRun if it has no GPU and this is no dry run."""
    if dry_run:
        return Target(torch.device("cpu"), tiny=True, folder=folder, scratch=scratch)
    if not torch.cuda.is_available():
        raise NotRun("this machine has no CUDA device; a dry run on the CPU needs --dry-run")
    torch.cuda.set_device(0)
    return Target(find_device("cuda:0"), tiny=False, folder=folder, scratch=scratch)
