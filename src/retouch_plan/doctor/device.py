"""The device that a recipe is checked for: a device of this machine, or a GPU by name."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from retouch.distributed.ranks import init_distributed
from retouch.recipe.recipe import Recipe
from retouch_plan.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch_plan.rehearsal.counting.machines import DEFAULT_GPU, MACHINES, Machine, find_machine

PROFILE = ".json"
"""The ending of a file with the measured rates of a GPU (``retouch_plan.rehearsal.counting.machines``)."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device with ``bytes`` of memory. ``device`` is None for a GPU of another machine, on which no trial step is possible."""

    name: str
    bytes: int
    device: torch.device | None


def require_known(name: str) -> None:
    """Raise ValueError unless ``name`` is a device in torch's notation, a known GPU, or the file of a GPU's measured profile."""
    if name.endswith(PROFILE):
        find_machine(name)
    elif name not in MACHINES and not _DEVICE.fullmatch(name):
        raise ValueError(
            f"--device {name}: use auto, cpu, mps, cuda or cuda:N for a device of this machine, one of {', '.join(MACHINES)}, or "
            "the JSON file of a measured profile"
        )


def local_name(name: str) -> str:
    """The device of this machine that checks use: ``name`` itself, or ``auto`` if ``name`` is a GPU of another machine."""
    return "auto" if name in MACHINES or name.endswith(PROFILE) else name


def check_device(name: str, *, device: torch.device | None, weights_here: bool) -> tuple[PlannedDevice | None, Finding]:
    """The device that ``name`` means; None if it is not available. ``device``: the device that the rank joined with, if any.

    Without CUDA and without the weights on this machine, ``auto`` means a common GPU, because the run will not take place here.
    """
    if name.endswith(PROFILE):
        machine = find_machine(name)
        text = f"{machine.name}, {gigabytes(machine.memory)} of memory (not this machine; rates: {machine.measured})"
        return PlannedDevice(machine.name, machine.memory, None), ok("device", text)
    if name in MACHINES:
        memory = MACHINES[name].memory
        return PlannedDevice(name, memory, None), ok("device", f"{name}, {gigabytes(memory)} of memory (not this machine)")
    if name == "auto" and not weights_here and not torch.cuda.is_available():
        text = f"no CUDA device on this machine: checking for {DEFAULT_GPU}; --device chooses another ({', '.join(MACHINES)})"
        return PlannedDevice(DEFAULT_GPU, MACHINES[DEFAULT_GPU].memory, None), note("device", text)
    if device is None:
        try:
            device = init_distributed(name).device
        except ValueError as error:
            return None, failed("device", str(error), fix="--device auto")
    target = local_device(device)
    return target, ok("device", f"{target.name}, {gigabytes(target.bytes)} of memory{_used(device)}")


def check_kernels(recipe: Recipe, target: PlannedDevice | None) -> Iterator[Finding]:
    """Check whether the attention backend of the recipe can train on the device, and whether the blocks can be compiled there."""
    policy = recipe.policy
    chosen = {"policy.model.attention": getattr(policy.model, "attention", "sdpa")} if policy.is_autoregressive else {}
    chosen |= {f"policy.{key}": getattr(policy, key, None) for key in ("attention", "compile")}
    named = ", ".join(f"{key} {value}" for key, value in chosen.items() if value not in (None, "sdpa"))
    if target is None:
        return
    attention = getattr(policy, "attention", None) or getattr(policy.model, "attention", "sdpa")
    if attention == "sdpa" and (target.device is None or target.device.type == "cuda"):
        fp32 = getattr(policy.model, "dtype", "float32") == "float32"
        kernel = "memory-efficient attention" if fp32 else "FlashAttention, and memory-efficient attention where there is a mask"
        yield note("kernels", f"attention: torch's {kernel}; cuDNN's, which can crash, only with policy.attention=_native_cudnn")
    if not named:
        return
    if target.device is None:
        yield note("kernels", f"{named}: not tried, because {target.name} is not in this machine")
        return
    try:
        policy.require_kernels(target.device)
    except ValueError as error:
        key = str(error).partition(":")[0]
        yield failed("kernels", str(error), fix=f"--set {key}={'sdpa' if 'model' in key else 'null'}")
    else:
        yield ok("kernels", f"{named}: tried on {target.device}")


def machine_of(target: PlannedDevice, name: str) -> Machine:
    """The machine on which a step is rehearsed for ``target``. ``name``: the option ``--device``.

    A device of this machine has the rates of the GPU that its name contains; if there is none, those of a common GPU.
    """
    if name.endswith(PROFILE):
        return find_machine(name)
    if target.device is None:
        return MACHINES[target.name]
    words = target.name.lower()
    like = [each for each in MACHINES.values() if all(part in words for part in each.name.split("-"))]
    base = like[0] if like else MACHINES[DEFAULT_GPU]
    return replace(base, name=target.name, memory=target.bytes, measured=f"rates of {base.name}: {base.measured}")


def local_device(device: torch.device) -> PlannedDevice:
    """A device of this machine with its total memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return PlannedDevice(f"{device} ({properties.name})", properties.total_memory, device)
    return PlannedDevice(str(device), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), device)


def _used(device: torch.device) -> str:
    """Text with the GPU memory that is in use; empty for other devices."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f", {gigabytes(total - free)} of it in use"
