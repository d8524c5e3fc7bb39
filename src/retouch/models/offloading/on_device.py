"""Frozen modules that wait in CPU memory and are on a device only while they are used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def on_device(device: torch.device, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block the parts' parameters and buffers are copies on ``device``; after it they are the same tensors as before.

    Changes of a copy are lost, so this is for frozen weights: they wait in the CPU's memory, and a device holds a policy and them
    in turn.
    """
    waiting: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    try:
        for table, name, tensor in _tensors(parts):
            if id(tensor) not in copies:  # shared weights stay shared
                moved = tensor.detach().to(device)
                copies[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
            waiting.append((table, name, tensor))
            table[name] = copies[id(tensor)]
        yield
    finally:
        for table, name, tensor in waiting:
            table[name] = tensor


def parts_of(model: Any, *, key: str = "devices.offload") -> list[nn.Module]:
    """The modules of an image model, its transformer first. Raises ValueError for a model without a property ``parts``.

    ``key``: the key of the recipe that needs them.
    """
    parts: list[nn.Module] | None = getattr(model, "parts", None)
    if parts is None:
        raise ValueError(f"{key}: what {type(model).__name__} is made of is not known here; remove the key")
    return parts


def _tensors(parts: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Each parameter and buffer, with the table of its module that has it, and its name there."""
    for module in [module for part in parts for module in part.modules()]:
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor
