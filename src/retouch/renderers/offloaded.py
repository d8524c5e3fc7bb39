"""A renderer whose weights wait in the CPU's memory while nothing is drawn, so that one device holds a policy and them in turn.

The weights are frozen, so nothing is ever copied back: what lies on the device is dropped, and what waited is as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from retouch.protocols import Renderer
from retouch.types import Task


class Offloaded:
    """``renderer``, its ``parts`` on ``device`` for the length of each call and else on the CPU (implements ``Renderer``)."""

    def __init__(self, renderer: Renderer, parts: Sequence[nn.Module], device: torch.device) -> None:
        self.renderer = renderer
        self.parts = tuple(parts)
        self.device = device

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        with lent_to(self.device, self.parts):
            return self.renderer(tasks, trajectory)


@contextmanager
def lent_to(device: torch.device, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block the parts' parameters and buffers are copies on ``device``; after it they are the very tensors of before.

    What is written to a copy is lost, so this is for weights that nobody trains.
    """
    waiting: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    try:
        for module in (module for part in parts for module in part.modules()):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in copies:  # shared weights stay shared
                        moved = tensor.detach().to(device)
                        copies[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
                    waiting.append((table, name, tensor))
                    table[name] = copies[id(tensor)]
        yield
    finally:
        for table, name, tensor in waiting:
            table[name] = tensor
