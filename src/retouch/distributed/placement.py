"""Which device each part of a rank's work lies on, from what the recipe says and which rank this is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from retouch.distributed.ranks import Ranks, join
from retouch.recipe.devices import Devices
from retouch.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of one rank lie. ``offload``: the renderer waits in the CPU's memory while nothing is drawn. ``waiting``:
    where copies of the weights lie while they are not used, by their names; the others are with the policy."""

    policy: torch.device
    renderer: torch.device
    reward: torch.device
    offload: bool = False
    waiting: Mapping[str, torch.device] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each device once."""
        return tuple(dict.fromkeys((self.policy, self.renderer, self.reward)))


def place(recipe: Recipe, ranks: Ranks) -> Placement:
    """The rank's devices; its policy's is the one that it joined with."""
    devices = recipe.devices or Devices()
    renderer, reward = (
        ranks.device if name is None else own_device(name, devices, local_rank=_local_rank())
        for name in (devices.renderer, devices.reward)
    )
    waiting = {} if devices.reference is None else {"reference": torch.device(devices.reference)}
    return Placement(ranks.device, renderer, reward, devices.offload, waiting)


def join_ranks(recipe: Recipe) -> Ranks:
    """As ``join``, where the recipe may name more than one device. ValueError where one of them is not there."""
    devices = recipe.devices
    if devices is None:
        return join(recipe.device)
    for part, name in devices.named.items():
        device = own_device(name, devices, local_rank=_local_rank())
        if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ValueError(
                f"devices.{part}: {name} of this rank is {device}, and this machine has {there} CUDA devices; every rank takes "
                f"{gpus_of_a_rank(devices)} of them. Start fewer ranks, or name fewer devices"
            )
    policy = _policys(devices, fallback=recipe.device)
    ranks = join(policy)
    device = own_device(policy, devices, local_rank=_local_rank()) if policy.startswith("cuda") else ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return replace(ranks, device=device)


def own_device(name: str, devices: Devices, *, local_rank: int) -> torch.device:
    """The device that a name in ``devices`` means on the rank of this number on its machine."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    return torch.device("cuda", local_rank * gpus_of_a_rank(devices) + (device.index or 0))


def gpus_of_a_rank(devices: Devices) -> int:
    """How many GPUs each rank takes."""
    named = [torch.device(name) for name in devices.named.values()]
    return max((1 + (device.index or 0) for device in named if device.type == "cuda"), default=1)


def _policys(devices: Devices, *, fallback: str) -> str:
    """Its name in ``devices``, or the first of the rank's GPUs where ``device`` leaves it open and there are any."""
    if devices.policy is not None:
        return devices.policy
    return "cuda:0" if fallback == "auto" and torch.cuda.is_available() else fallback


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
