"""Frozen modules that are stored in CPU memory and copied to a device only while they are used."""

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
    """Inside the block, the parts' parameters and buffers are copies on ``device``; after it, they are the same tensors as before.

    Changes of a copy are lost, so use this for frozen weights only: they stay in CPU memory, and occupy device memory only inside
    the block. The host does not wait for copies from page-locked memory; it never writes to the tensors it copies (``to_device``).
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
    """Move the parts' weights to page-locked memory, from which ``on_device`` copies them to a GPU.

    Does nothing if ``device`` is not a CUDA GPU. The weights share large buffers, because torch rounds every piece of page-locked
    memory up to a power of two.
    """
    if device.type == "cuda":
        repack(parts, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))


def repack(parts: Sequence[nn.Module], allocate: Callable[[int], Tensor]) -> None:
    """Move the parts' parameters and buffers into shared buffers of ``BUFFER_BYTES``; larger tensors get a buffer of their size.

    ``allocate``: returns a buffer with the given number of bytes. Tensors that are already in page-locked memory are not moved.
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
    """Return the modules of an image model, its transformer first. Raises ValueError for a model without a property ``parts``.

    ``key``: the recipe key that needs the modules.
    """
    parts: list[nn.Module] | None = getattr(model, "parts", None)
    if parts is None:
        raise ValueError(f"{key}: the modules of {type(model).__name__} are unknown, it has no property `parts`; remove the key")
    return parts


def _tensors(parts: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (table, name, tensor) for each parameter and buffer; ``table`` is the module's dict that contains the tensor."""
    for module in [module for part in parts for module in part.modules()]:
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor
