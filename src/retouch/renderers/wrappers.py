"""Renderers around another one: with other weights, with weights that are fetched to a device, or without the completions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from retouch.protocols import Renderer
from retouch.renderers.sampling import HasCompletions
from retouch.types import Completion, Task


class RendererInContext:
    """``renderer``, called inside the context that ``context`` opens (implements ``retouch.protocols.Renderer``).

    The context may give the policy's module its averaged weights, or put frozen weights on a device (``on_device``).
    """

    def __init__(self, renderer: Renderer, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.renderer = renderer
        self.context = context

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        with self.context():
            return self.renderer(tasks, trajectory)


@contextmanager
def on_device(device: torch.device, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block the parts' parameters and buffers are copies on ``device``; after it they are the same tensors as before.

    Changes of a copy are lost, so this is for frozen weights: they wait in the CPU's memory, and a device holds a policy and them
    in turn.
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


def parts_of(model: Any) -> list[nn.Module]:
    """The modules of an image model. Raises ValueError for a model without a property ``parts``."""
    parts: list[nn.Module] | None = getattr(model, "parts", None)
    if parts is None:
        raise ValueError(f"devices.offload: what {type(model).__name__} is made of is not known here; use false")
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """Completions in place of a trajectory (implements ``HasCompletions``)."""

    outputs: Sequence[Completion]

    @classmethod
    def empty(cls, tasks: Sequence[Task], completions: Sequence[Completion]) -> "Completions":
        """In place of each completion an empty response, or the task's instruction as the prompt, with the same noise."""
        pairs = zip(tasks, completions, strict=True)
        return cls([replace(each, ids=(), text=task.instruction, truncated=False) for task, each in pairs])


class BlindRenderer:
    """A control: makes the image of each row without its completion (implements ``retouch.protocols.Renderer``).

    A policy that still gains reward under it has not gained by its completions.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        return self.renderer(tasks, Completions.empty(tasks, trajectory.outputs))
