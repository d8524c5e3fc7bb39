"""Named copies of a module's trainable weights (reference, old, average), swapped in for the length of a block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightCopies:
    """Copies of the trainable parameters of ``module``, by name of the copy.

    A copy holds only what trains: the LoRA matrices, or all weights. Memory: one trainable set per copy. ``waiting``: where
    copies of some names lie while they are not used; the others lie beside the weights.
    """

    def __init__(self, module: nn.Module, *, waiting: Mapping[str, torch.device] | None = None) -> None:
        self.waiting = dict(waiting or {})
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.copies: dict[str, dict[str, Tensor]] = {}

    def keep(self, copy: str) -> None:
        """Make (or overwrite) a copy of the weights as they are now."""
        self.copies[copy] = {
            name: parameter.detach().to(self.waiting.get(copy, parameter.device), copy=True)
            for name, parameter in self.parameters.items()
        }

    def keep_without_adapter(self, copy: str) -> None:
        """Make a copy that acts as the frozen weights alone: every LoRA B matrix is zero, so the adapter adds exactly 0."""
        self.keep(copy)
        for name, tensor in self.copies[copy].items():
            if "lora_B" in name:
                tensor.zero_()
            elif "lora_A" not in name:
                raise ValueError(f"cannot switch off the adapter: {name} trains too and is no LoRA matrix; train one or the other")

    @torch.no_grad()
    def blend(self, copy: str, decay: float) -> None:
        """Move a copy towards the current weights: copy = decay * copy + (1 - decay) * current. ``decay`` in [0, 1]."""
        torch._foreach_lerp_(list(self.copies[copy].values()), [p.detach() for p in self.parameters.values()], 1.0 - decay)

    @contextmanager
    def using(self, copy: str) -> Iterator[None]:
        """Inside the block the module computes with the copy; no graph may be built there and kept."""
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = self.copies[copy][name].to(parameter.device)
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]

    def state(self) -> dict[str, Tensor]:
        """Every copy's tensors under ``<copy>/<parameter>``."""
        return {f"{copy}/{name}": tensor for copy, tensors in self.copies.items() for name, tensor in tensors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave. ValueError where the names differ: the checkpoint belongs to another recipe."""
        if state.keys() != self.state().keys():
            odd = sorted(state.keys() ^ self.state().keys())
            raise ValueError(f"the checkpoint's weight copies differ from this run's: {odd[:4]}{' ...' if len(odd) > 4 else ''}")
        for copy, tensors in self.copies.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[f"{copy}/{name}"])
