"""Frozen modules that wait in CPU memory and are on a device only while they are used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retouch.models.common.parts import to_device

BUFFER_BYTES = 2**30
_ALIGNMENT = 256


@contextmanager
def on_device(device: torch.device, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block the parts' parameters and buffers are copies on ``device``; after it they are the same tensors as before.

    Changes of a copy are lost, so this is for frozen weights: they wait in the CPU's memory, and a device holds a policy and them
    in turn. The host does not wait for copies from page-locked memory; it never writes to what it copies from (``to_device``).
    """
    waiting: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    try:
        for table, name, tensor in _tensors(parts):
            if id(tensor) not in copies:  # shared weights stay shared
                moved = to_device(tensor.detach(), device)
                copies[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
            waiting.append((table, name, tensor))
            table[name] = copies[id(tensor)]
        yield
    finally:
        for table, name, tensor in waiting:
            table[name] = tensor


def page_lock(parts: Sequence[nn.Module], device: torch.device) -> None:
    """Move the parts' weights to page-locked memory, from which ``on_device`` copies them to a GPU; nothing for another ``device``.

    They share large buffers, because torch rounds every piece of page-locked memory up to a power of two.
    """
    if device.type == "cuda":
        repack(parts, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))


def repack(parts: Sequence[nn.Module], allocate: Callable[[int], Tensor]) -> None:
    """Move the parts' parameters and buffers into buffers of ``BUFFER_BYTES``, or of their own size if they are larger.

    ``allocate``: gives a buffer of so many bytes. Tensors that are in page-locked memory stay where they are.
    """
    buffer, used, moved = None, 0, set()
    for _, _, tensor in _tensors(parts):
        size = tensor.numel() * tensor.element_size()
        if id(tensor) in moved or size == 0 or tensor.is_pinned():
            continue
        moved.add(id(tensor))
        if buffer is None or used + size > len(buffer):
            buffer, used = allocate(max(size, BUFFER_BYTES)), 0
        place = buffer[used : used + size].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor.data)
        used += -(-size // _ALIGNMENT) * _ALIGNMENT


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
