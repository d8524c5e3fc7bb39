"""Simulates rank 0 of several ranks, and DeepSpeed: collectives move no data, but are counted.

Every rank is assumed to hold the same values as rank 0, so a gathered tensor repeats rank 0's values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from retouch.distributed import ranks, zero
from retouch_plan.accelerator import HANDLERS, Accelerator, FakeTensor, fake_tensors_of, mapped, tensors_of
from retouch_plan.meter import Meter

_GATHERS = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_")
_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    *("broadcast_", "scatter_", "gather_", *_GATHERS),
)


@contextmanager
def fake_ranks(world: int, meter: Meter) -> Iterator[None]:
    """Inside the context, this process is rank 0 of a process group of ``world`` ranks."""
    if world == 1:
        yield
        return

    def collective(machine: Accelerator, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        given = fake_tensors_of(args, kwargs)
        if not given:
            return False, None
        meter.communicate(sum(each.numel() * each.element_size() for each in given), world)
        unit = max(min(each.numel() for each in given), 1)
        _, work = func(*mapped(args, lambda each: torch.zeros(each.numel() // unit), FakeTensor), **kwargs)
        if func.overloadpacket._qualified_op_name.split("::")[1] in _GATHERS:
            source = tensors_of(args[1])[0]
            values = source.known_values if isinstance(source, FakeTensor) else None
            for output in () if values is None else fake_tensors_of(args[0]):
                assert values is not None
                output.value = values.flatten().repeat(output.numel() // max(source.numel(), 1)).view(output.shape).clone()
                output.known[0] = True
        return True, (args[0], work)

    packets = [getattr(torch.ops.c10d, name) for name in _COLLECTIVES]
    HANDLERS.update(dict.fromkeys(packets, collective))
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    try:
        with (
            patch.object(_fsdp_param, "alloc_storage", lambda tensor: meter.resize(tensor, tensor.numel() * tensor.itemsize)),
            patch.object(_fsdp_param, "free_storage", lambda tensor: meter.resize(tensor, 0)),
        ):
            yield
    finally:
        dist.destroy_process_group()
        for packet in packets:
            HANDLERS.pop(packet, None)


@contextmanager
def fake_deepspeed(meter: Meter) -> Iterator[None]:
    """Inside the context, ``ZeroStepper`` uses ``_Engine`` instead of DeepSpeed, which does not support the fake accelerator."""
    library = SimpleNamespace(initialize=lambda **options: (_Engine(options["optimizer"], meter),))
    with patch.object(zero, "_deepspeed", lambda device: library), patch.object(ranks, "require_deepspeed", lambda: None):
        yield


class _Engine:
    """Replaces DeepSpeed's engine, with the memory and the communication of its ZeRO-2.

    Source: ZeRO stage 2 (Rajbhandari et al. 2020, arXiv 1910.02054), with DeepSpeed's allocations: during a backward pass, a bucket
    for all gradients, to which each gradient is moved once it exists; and this rank's shard of gradients, fp32 weights and moments.
    ``optimizer`` is the sharded optimizer; ``optimizer.optimizer`` is the given one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, meter: Meter) -> None:
        self._meter = meter
        (group,) = optimizer.param_groups
        self._weights: list[Tensor] = list(group["params"])
        first, world = self._weights[0], dist.get_world_size()
        self._size = sum(weight.numel() for weight in self._weights)
        self._share = torch.zeros(-(-self._size // world), device=first.device)
        group["params"] = [self._share]
        self.optimizer = SimpleNamespace(
            single_partition_of_fp32_groups=[self._share],
            optimizer=optimizer,
            param_groups=optimizer.param_groups,
            overflow=False,
            refresh_fp32_params=lambda: None,
        )
        self._gradient: Tensor | None = None
        self._bucket: Tensor | None = None
        start = 0
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(partial(self._into_bucket, start=start))
            start += weight.numel()

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * 1.0

    def backward(self, loss: Tensor) -> None:
        first = self._weights[0]
        self._bucket = bucket = torch.empty(self._size, dtype=first.dtype, device=first.device)
        self._meter.relabel([bucket], "gradients")
        loss.backward()
        for weight in self._weights:
            weight.grad = None
        dist.all_reduce(bucket)
        if self._gradient is None:
            self._gradient = torch.zeros(self._share.shape, dtype=first.dtype, device=first.device)
        own = bucket[: self._share.numel()]
        self._gradient[: own.numel()].add_(own)
        self._bucket = None

    def _into_bucket(self, weight: Tensor, start: int) -> None:
        if self._bucket is not None and weight.grad is not None:
            place = self._bucket[start : start + weight.numel()].view_as(weight)
            place.copy_(weight.grad)
            weight.grad = place

    def step(self) -> None:
        assert self._gradient is not None
        self._share.grad = self._gradient.to(self._share.dtype)
        self.optimizer.optimizer.step()
        self._share.grad = self._gradient = None
        for weight in self._weights:
            weight.data.copy_(weight.data)  # the updated shards of all ranks are written in place
        dist.all_reduce(self._share.to(self._weights[0].dtype))

    def get_global_grad_norm(self) -> float:
        return 1.0

    def destroy(self) -> None:
        """Do nothing: no hooks have to be removed."""
