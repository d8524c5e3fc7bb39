"""The process group and the collectives of a run's ranks. A single rank needs no process group."""

import atexit
import importlib.util
import logging
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from retouch.distributed.launching import STORE
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import ZERO3, Recipe

TIMEOUT = "RETOUCH_RANK_TIMEOUT"
_RELEASE_SECONDS = 0.2
log = logging.getLogger("retouch")
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
        if _enabled(os.environ, "ACCELERATE_USE_CPU"):
            log.warning("`accelerate launch --cpu` starts one rank, whatever --num_processes is; use `retouch launch --nproc N`")
        return Ranks(device=chosen)
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
                f"{gpus_per_rank(devices)} of them. Start fewer ranks, use fewer devices, or use one with --set devices=null"
            )
    # ``auto`` is the rank's first GPU, if there is a GPU.
    policy = devices.policy or ("cuda:0" if recipe.device == "auto" and torch.cuda.is_available() else recipe.device)
    ranks = init_distributed(policy)
    device = resolve_device(policy, devices, local_rank=_local_rank()) if policy.startswith("cuda") else ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return replace(ranks, device=device)


def set_numerics(recipe: Recipe) -> None:
    """Choose the GPU algorithms of this process from ``tf32`` and ``deterministic``, and an allocator whose segments can grow.
    Call it before anything runs on the GPU.

    Source: PyTorch's notes on reproducibility, on numerical accuracy and on the CUDA allocator.
    """
    # Rows of many lengths and sizes fragment segments of a fixed size. Both names of the variable are the user's choice.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
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


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def require_deepspeed() -> None:
    """Raise ValueError if DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("sharding zero2 needs DeepSpeed: pip install 'retouch[deepspeed]', or use fsdp2, which is part of torch")


def check_sharding(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Raise ValueError if the sharding needs a library that is not installed, or contradicts ``accelerate launch``.

    ``environment``: the environment variables of the process, through which ``accelerate launch`` passes its configuration. A
    configuration contradicts the recipe if it sets another sharding, or one that is not supported.
    """
    if recipe.sharding == "zero2" and int(environment.get("WORLD_SIZE", "1")) > 1:
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
