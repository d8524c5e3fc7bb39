"""Named copies of a module's trainable weights ("reference", "old", "average"), which can be swapped in for a block of code; and
whole models that compute in its place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retouch.models.offloading import on_device
from retouch.models.parts import compute_device, page_locked, to_device

_STALE = "sampling-"


def stale_copies(staleness: int) -> tuple[str, ...]:
    """The names of the weight copies from the start of the last ``staleness`` steps; step s uses the name at s % staleness."""
    return tuple(f"{_STALE}{place}" for place in range(staleness))


class WeightCopies:
    """Copies of the trainable parameters of ``module``, by the copy's name.

    A copy contains only the trainable parameters: the LoRA matrices, or all weights.
    ``devices``: for each name, the device that stores the copy while it is not used; the default is the device of the
    weights. Copies in CPU memory are page-locked if the weights are on a GPU, and are overwritten only by ``update_ema``.
    ``models``: frozen models by name, such as larger ones. Their modules may be in CPU memory, and are in no checkpoint.
    """

    def __init__(self, module: nn.Module, *, devices: Mapping[str, torch.device] | None = None) -> None:
        self.devices = dict(devices or {})
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.models: dict[str, Any] = {}

    def snapshot(self, copy: str) -> None:
        """Copy the current weights to ``copy``; an existing copy is replaced.

        "reference" and the copies for stale rollouts contain exactly the weights of some step, in their dtype. The others may be
        averages ("old", "average"), which would lose small updates in 16 bits and are in fp32.
        """
        self.copies[copy] = {}
        exact = copy == "reference" or copy.startswith(_STALE)
        for name, parameter in self.parameters.items():
            device = self.devices.get(copy, parameter.device)
            dtype = parameter.dtype if exact or parameter.dtype.itemsize > 2 else torch.float32
            stored = parameter.detach().to(device, dtype, copy=True)
            self.copies[copy][name] = stored if stored.device == parameter.device else page_locked(stored, parameter.device)

    def snapshot_without_adapter(self, copy: str) -> None:
        """Make a copy that behaves like the frozen base weights: all LoRA B matrices are zero, so the adapter adds exactly 0.

        Raises ValueError if a trainable parameter is not a LoRA matrix.
        """
        self.snapshot(copy)
        for name, tensor in self.copies[copy].items():
            if "lora_B" in name:
                tensor.zero_()
            elif "lora_A" not in name:
                raise ValueError(f"cannot disable the adapter: {name} trains too but is not a LoRA matrix; train one or the other")

    @torch.no_grad()
    def update_ema(self, copy: str, decay: float) -> None:
        """Exponential moving average: copy = decay * copy + (1 - decay) * current, with ``decay`` in [0, 1]."""
        averages = list(self.copies[copy].values())
        weights = [p.detach().to(average.dtype) for p, average in zip(self.parameters.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    @contextmanager
    def using(self, copy: str) -> Iterator[None]:
        """Swap the copy's weights into the module inside the block. An autograd graph built inside must not be used after it."""
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = to_device(self.copies[copy][name], parameter.device, parameter.dtype)
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]

    @contextmanager
    def model_with(self, name: str, own: Any) -> Iterator[Any]:
        """The model with the weights of this name: one of ``models``, or ``own`` with a copy's weights in its module. The module is
        on the device of that of ``own``."""
        if (model := self.models.get(name)) is None:
            with self.using(name):
                yield own
            return
        with on_device(compute_device(own.module), [model.module]):
            yield model

    def state(self) -> Mapping[str, Tensor]:
        """The tensors of all copies, with the names ``<copy>/<parameter>``."""
        return {f"{copy}/{name}": tensor for copy, tensors in self.copies.items() for name, tensor in tensors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``. Raises ValueError if the names differ: the checkpoint belongs to another recipe."""
        if state.keys() != self.state().keys():
            differing = sorted(state.keys() ^ self.state().keys())
            shown = f"{differing[:4]}{' ...' if len(differing) > 4 else ''}"
            raise ValueError(f"the checkpoint's weight copies differ from this run's: {shown}")
        for copy, tensors in self.copies.items():
            for name, tensor in tensors.items():
                content, device = state[f"{copy}/{name}"], self.parameters[name].device
                if tensor.device == device:
                    tensor.copy_(content)
                else:  # the device may still be reading the old tensor, see ``to_device``
                    tensors[name] = page_locked(torch.empty_like(tensor).copy_(content), device)
