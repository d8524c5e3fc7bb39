"""Weights that FSDP2 has spread over the ranks: whole for a checkpoint, and copies of them to swap in."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from retouch.policies.weights import WeightCopies


class ShardedCopies(WeightCopies):
    """Copies of sharded weights, sharded alike.

    Shares are swapped in by their contents, since FSDP gathers from storage of its own, which a parameter's ``data`` does not
    reach; weights that are whole by their ``data``, since autograd may have kept them. ``state`` and ``load`` deal in whole tensors
    and are called by all ranks.
    """

    @torch.no_grad()
    def blend(self, copy: str, decay: float) -> None:
        for name, parameter in self.parameters.items():
            local(self.copies[copy][name]).lerp_(local(parameter), 1.0 - decay)

    @contextmanager
    def using(self, copy: str) -> Iterator[None]:
        shares = {name: local(parameter) for name, parameter in self.parameters.items() if isinstance(parameter, DTensor)}
        current = {name: share.clone() for name, share in shares.items()}
        alone = {name: parameter.data for name, parameter in self.parameters.items() if name not in shares}
        with torch.no_grad():
            for name, share in shares.items():
                share.copy_(local(self.copies[copy][name]))
        for name in alone:
            self.parameters[name].data = self.copies[copy][name]
        try:
            yield
        finally:
            with torch.no_grad():
                for name, share in shares.items():
                    share.copy_(current[name])
            for name, data in alone.items():
                self.parameters[name].data = data

    def state(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in super().state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        kept = super().state()
        if state.keys() != kept.keys():
            super().load(state)  # says which
        for name, tensor in kept.items():
            fill(tensor, state[name])


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor; all of one that is not shared. They have one storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(tensor: Tensor, content: Tensor) -> None:
    """Write all of a tensor, each rank its share. All ranks call it with the same content."""
    if isinstance(tensor, DTensor):
        content = content.to(tensor.device, tensor.dtype)
        shared = distribute_tensor(content, tensor.device_mesh, tensor.placements, src_data_rank=None)  # all ranks have it
        tensor.to_local().copy_(shared.to_local())
    else:
        tensor.copy_(content)
