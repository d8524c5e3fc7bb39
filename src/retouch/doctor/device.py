"""Where a recipe would run: a device of this machine, or a GPU by name, for which can only be planned."""

import os
import re
from dataclasses import dataclass

import torch

from retouch.distributed.ranks import init_distributed
from retouch.doctor.findings import Finding, failed, gigabytes, note, ok

_GIB = 2**30

# As torch reports them (``total_memory``, and the "total capacity" of its out-of-memory messages), which is less than is printed
# on the box counts.
CARDS = {
    "h200": int(139.8 * _GIB),
    "h100": int(79.1 * _GIB),
    "a100-80gb": int(79.1 * _GIB),
    "l40s": int(44.4 * _GIB),
    "a100-40gb": int(39.4 * _GIB),
    "5090": int(31.4 * _GIB),
    "4090": int(23.6 * _GIB),
}
"""GPUs by the name that ``--device`` takes, and their memory in bytes."""
PLANNED = "h100"
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class Place:
    """``bytes`` of memory; ``device`` None: it is not here, so that nothing can be tried on it."""

    name: str
    bytes: int
    device: torch.device | None


def require_known(name: str) -> None:
    """ValueError unless ``name`` is a device in torch's spelling or a known GPU."""
    if name not in CARDS and not _DEVICE.fullmatch(name):
        raise ValueError(
            f"--device {name}: take auto, cpu, mps, cuda or cuda:N for a device of this machine, or {', '.join(CARDS)}"
        )


def local_name(name: str) -> str:
    """The device of this machine that goes with the name: itself, and for the name of a GPU whatever is here."""
    return "auto" if name in CARDS else name


def check_device(name: str, *, device: torch.device | None, weights_here: bool) -> tuple[Place | None, Finding]:
    """What ``name`` stands for. ``device``: the one that the rank has joined with, if it has.

    ``auto`` without CUDA stands for a usual GPU where the weights are not on this machine: they will not be used here.
    """
    if name in CARDS:
        return Place(name, CARDS[name], None), ok("device", f"planned for {name}, {gigabytes(CARDS[name])} of memory")
    if name == "auto" and not weights_here and not torch.cuda.is_available():
        planned = f"no CUDA device is here: planned for {PLANNED}, a GPU of 80 GB; --device names another ({', '.join(CARDS)})"
        return Place(PLANNED, CARDS[PLANNED], None), note("device", planned)
    if device is None:
        try:
            device = init_distributed(name).device
        except ValueError as error:
            return None, failed("device", str(error), mend="--device auto")
    place = measured(device)
    return place, ok("device", f"{place.name}, {gigabytes(place.bytes)} of memory{_used(device)}")


def place_of(name: str, place: Place) -> Place:
    """Where a part lies whose device has this name in a recipe, beside a policy on ``place``: planned for, all GPUs are alike."""
    if place.device is None or name in ("auto", str(place.device), place.device.type):
        return place
    return measured(torch.device(name))


def measured(device: torch.device) -> Place:
    """A device of this machine."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Place(f"{device} ({properties.name})", properties.total_memory, device)
    return Place(str(device), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), device)


def _used(device: torch.device) -> str:
    """What others hold of a GPU's memory already."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f", {gigabytes(total - free)} of it in use"
