"""Sets up a rank as the recipe says: the devices of its parts (policy, renderer, rewards), the memory limit, and the sharding,
which must agree with accelerate's configuration."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from retouch.distributed.ranks import Ranks, init_distributed
from retouch.recipe.checks import ZERO3
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import Recipe

_SHIPPED = "recipes/accelerate/"


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of one rank's parts.

    ``offload``: keep the renderer in CPU memory while nothing is rendered. ``weights_on_cpu``: keep sharded weights in CPU memory
    while they do not compute.
    """

    policy: torch.device
    renderer: torch.device
    reward: torch.device
    offload: bool = False
    weights_on_cpu: bool = False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The distinct devices of this rank."""
        return tuple(dict.fromkeys((self.policy, self.renderer, self.reward)))


def plan_placement(recipe: Recipe, ranks: Ranks) -> Placement:
    """Return the devices of this rank's parts. The device of the policy is ``ranks.device``."""
    devices = recipe.devices or Devices()
    renderer, reward = (
        ranks.device if name is None else resolve_device(name, devices, local_rank=_local_rank())
        for name in (devices.renderer, devices.reward)
    )
    return Placement(ranks.device, renderer, reward, devices.offload, devices.weights == "cpu")


def init_distributed_from_recipe(recipe: Recipe) -> Ranks:
    """Join the process group with the recipe's ``device`` or ``devices``, and apply its ``deterministic`` and ``tf32``.

    Raises ValueError if a device does not exist.
    """
    set_numerics(recipe)
    devices = recipe.devices
    if devices is None:
        return init_distributed(recipe.device)
    for part, name in devices.named.items():
        device = resolve_device(name, devices, local_rank=_local_rank())
        if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ValueError(
                f"devices.{part}: {name} of this rank is {device}, but this machine has {there} CUDA devices, and every rank uses "
                f"{gpus_per_rank(devices)} of them. Start fewer ranks, or use fewer devices"
            )
    policy = _policy_device(devices, fallback=recipe.device)
    ranks = init_distributed(policy)
    device = resolve_device(policy, devices, local_rank=_local_rank()) if policy.startswith("cuda") else ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return replace(ranks, device=device)


def set_numerics(recipe: Recipe) -> None:
    """Choose the GPU algorithms of this process from ``tf32`` and ``deterministic``. Call it before anything runs on the GPU.

    Source: PyTorch's notes on reproducibility and on numerical accuracy.
    """
    torch.backends.cuda.matmul.allow_tf32 = recipe.tf32
    torch.backends.cudnn.allow_tf32 = recipe.tf32
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers passes it to FlashAttention's backward pass
        # Do not set warn_only: with it, memory-efficient attention would keep its non-deterministic atomic sums.
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Filling uninitialised memory costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def resolve_device(name: str, devices: Devices, *, local_rank: int) -> torch.device:
    """Return the device that ``name`` in the recipe's ``devices`` means on a rank. ``local_rank``: its number on its machine."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    return torch.device("cuda", local_rank * gpus_per_rank(devices) + (device.index or 0))


def gpus_per_rank(devices: Devices) -> int:
    """Return the number of GPUs that each rank uses."""
    named = [torch.device(name) for name in devices.named.values()]
    return max((1 + (device.index or 0) for device in named if device.type == "cuda"), default=1)


def limit_memory(devices: Devices | None, placement: Placement) -> None:
    """Limit this process to the fraction of each GPU's memory that the recipe allows, if it sets one."""
    if devices is None or devices.memory_fraction is None:
        return
    for device in placement.devices:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(devices.memory_fraction, device)


def _policy_device(devices: Devices, *, fallback: str) -> str:
    """Return ``devices.policy``; if it is not given, the rank's first GPU if ``fallback`` is "auto" and there is a GPU, otherwise
    ``fallback``."""
    if devices.policy is not None:
        return devices.policy
    return "cuda:0" if fallback == "auto" and torch.cuda.is_available() else fallback


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def check_sharding(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Raise ValueError if the sharding needs a library that is not installed, or contradicts ``accelerate launch``.

    ``environment``: the environment variables of the process, through which ``accelerate launch`` passes its configuration. A
    configuration contradicts the recipe if it sets another sharding, or one that is not supported.
    """
    if recipe.sharding == "zero2" and int(environment.get("WORLD_SIZE", "1")) > 1:
        from retouch.distributed.zero import require_deepspeed

        require_deepspeed()
    waits = recipe.devices is not None and recipe.devices.weights is not None
    if waits and environment.get("WORLD_SIZE", "1") == "1":
        raise ValueError(
            "devices.weights: a single rank does not shard weights, so they cannot be kept in CPU memory; start more ranks, or "
            "remove this key"
        )
    launched = _sharding(environment)
    if launched is not None and launched != recipe.sharding:
        raise ValueError(
            f"accelerate's configuration has sharding {launched}, but the recipe has {recipe.sharding or 'none'}: "
            f"add --set sharding={launched}, or launch "
            + (f"with {_SHIPPED}{recipe.sharding}.yaml" if recipe.sharding else "with a configuration without sharding")
        )
    if launched == "fsdp2" and _enabled(environment, "FSDP_OFFLOAD_PARAMS") and not waits:
        raise ValueError(
            "accelerate's configuration offloads FSDP's parameters: add --set devices.weights=cpu, or set fsdp_offload_params "
            "to false"
        )


def _sharding(environment: Mapping[str, str]) -> str | None:
    """Return the sharding that accelerate's configuration sets, with its name in a recipe; None if it sets no sharding."""
    if _enabled(environment, "ACCELERATE_USE_DEEPSPEED"):
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            raise ValueError(f"accelerate's configuration names a DeepSpeed file, which is ignored; use {_SHIPPED}zero2.yaml")
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage == "3":
            raise ValueError(f"accelerate's configuration has zero_stage 3: {ZERO3}; use {_SHIPPED}zero2.yaml or fsdp2.yaml")
        if stage != "2":
            raise ValueError(f"accelerate's configuration has zero_stage {stage}; only 2 is supported, see {_SHIPPED}zero2.yaml")
        for part in ("OPTIMIZER", "PARAM"):
            if environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") != "none":
                raise ValueError(
                    f"accelerate's configuration offloads DeepSpeed's {part.lower()}, which is not supported; set it to none"
                )
        return "zero2"
    if _enabled(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION") != "2":
            raise ValueError(f"accelerate's configuration has fsdp_version 1; only 2 is supported, see {_SHIPPED}fsdp2.yaml")
        return "fsdp2"
    return None


def _enabled(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")
