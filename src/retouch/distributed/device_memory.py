"""The memory of a run's devices: how much of it a step took at most, and a limit to it."""

import resource
import sys

import torch

from retouch.distributed.placement import Placement
from retouch.distributed.ranks import Ranks
from retouch.recipe.devices import Devices

PEAK = "memory/peak_gb"
_GB = 1e9


class Memory:
    """Looks after the devices' memory from step to step."""

    def __init__(self, ranks: Ranks, placement: Placement, devices: Devices | None) -> None:
        self.ranks = ranks
        self.devices = placement.devices
        self.empty_every = 0 if devices is None else devices.empty_cache_every or 0
        parts = {placement.reward: "reward", placement.renderer: "renderer", placement.policy: "policy"}
        self.names = [f"/{parts[device]}" if len(self.devices) > 1 else "" for device in self.devices]

    def after_step(self, done: int) -> dict[str, float]:
        """What was in use at most during the step that brought the run to ``done``, by ``PEAK`` and, where there are
        several, its device and rank; all ranks call it. Gives torch's cache back where that is due."""
        peaks = torch.tensor([[peak_bytes(device) / _GB for device in self.devices]], dtype=torch.float64)
        if self.empty_every and done % self.empty_every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        found: dict[str, float] = {}
        for rank, row in enumerate(self.ranks.gather(peaks).tolist()):
            place = f"/rank-{rank}" if self.ranks.world > 1 else ""
            found |= {f"{PEAK}{name}{place}": peak for name, peak in zip(self.names, row, strict=True)}
        return found


def peak_bytes(device: torch.device) -> int:
    """Bytes of tensors on a CUDA device at most since the last call; elsewhere what this process has taken at most, ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def limit_memory(devices: Devices | None, placement: Placement) -> None:
    """Let this process take no more than the share that the recipe grants, where it does."""
    if devices is None or devices.memory_fraction is None:
        return
    for device in placement.devices:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(devices.memory_fraction, device)
