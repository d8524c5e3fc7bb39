"""Replaces DeepSpeed, which does not support the fake accelerator, with the memory and the communication of its ZeRO-2.

Source: ZeRO stage 2 (Rajbhandari et al. 2020, arXiv 1910.02054), with DeepSpeed's allocations: during a backward pass, a bucket for
all gradients, to which each gradient is moved once it exists; and this rank's shard of gradients, fp32 weights and moments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from retouch.distributed import zero
from retouch_plan.rehearsal.counting.meter import Meter


@contextmanager
def fake_deepspeed(meter: Meter) -> Iterator[None]:
    """Inside the context, ``ZeroStepper`` uses ``_Engine`` instead of DeepSpeed."""
    library = SimpleNamespace(initialize=lambda **options: (_Engine(options["optimizer"], meter),))
    with patch.object(zero, "_deepspeed", lambda device: library), patch.object(zero, "require_deepspeed", lambda: None):
        yield


class _Engine:
    """Replaces DeepSpeed's engine. ``optimizer`` is the sharded optimizer; ``optimizer.optimizer`` is the given one."""

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
        """Move a gradient into the bucket as soon as it exists."""
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
