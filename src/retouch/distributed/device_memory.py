"""Measures the peak memory of a run's devices in each step."""

import resource
import sys

import torch

from retouch.distributed.placement import Placement
from retouch.distributed.ranks import Ranks
from retouch.recipe.keys import Devices

PEAK = "memory/peak_gb"
_GB = 1e9


class DeviceMemory:
    """Measures the memory of this rank's devices after each step, and empties torch's cache as often as the recipe says."""

    def __init__(self, ranks: Ranks, placement: Placement, devices: Devices | None) -> None:
        self.ranks = ranks
        self.devices = placement.devices
        self.empty_every = 0 if devices is None else devices.empty_cache_every or 0
        parts = {placement.reward: "reward", placement.renderer: "renderer", placement.policy: "policy"}
        self.names = [f"/{parts[device]}" if len(self.devices) > 1 else "" for device in self.devices]

    def after_step(self, done: int) -> dict[str, float]:
        """Return the peak memory in GB during the step after which ``done`` steps are finished. All ranks must call it.

        A metric's name is ``PEAK``, followed by the part of the run if the rank has several devices, and by the rank if there are
        several ranks.
        """
        peaks = torch.tensor([[peak_bytes(device) / _GB for device in self.devices]], dtype=torch.float64)
        if self.empty_every and done % self.empty_every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        found: dict[str, float] = {}
        for rank, row in enumerate(self.ranks.gather(peaks).tolist()):
            place = f"/rank-{rank}" if self.ranks.world > 1 else ""
            found |= {f"{PEAK}{name}{place}": peak for name, peak in zip(self.names, row, strict=True)}
        return found


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on a CUDA device since the last call; elsewhere, the peak memory of this process so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
