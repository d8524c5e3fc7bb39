"""Measures the memory of a computation: the peak of the CPU's allocator, and the tensors that autograd saves in a forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def measured_peak(compute: Callable[[], Any]) -> int:
    """Return the peak of allocated bytes while ``compute`` ran, without the bytes that were allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        compute()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    out = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        out += event.nbytes()
        most = max(most, out)
    return most


def saved_bytes(run: Callable[[], Any], module: nn.Module) -> int:
    """Return the bytes of the storages that autograd saves in a forward pass, without the weights of ``module``."""
    weights, kept = {weight.untyped_storage().data_ptr() for weight in module.parameters()}, dict[int, Any]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(size for size, _ in kept.values())
