"""Weight copies of a model that FSDP2 has sharded, and conversions between sharded and full tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from retouch.distributed.stepper import local_shard
from retouch.policies.weights import WeightCopies


class ShardedCopies(WeightCopies):
    """Copies of sharded weights, with the same sharding.

    Sharded weights are swapped by content, because FSDP gathers from storage of its own that a parameter's ``data`` does not reach.
    Replicated weights are swapped by ``data``, because autograd may have saved them. ``state`` and ``load`` use full tensors and
    are called by all ranks.
    """

    @torch.no_grad()
    def update_ema(self, copy: str, decay: float) -> None:
        for name, parameter in self.parameters.items():
            local_shard(self.copies[copy][name]).lerp_(local_shard(parameter), 1.0 - decay)

    @contextmanager
    def using(self, copy: str) -> Iterator[None]:
        shards = {name: local_shard(parameter) for name, parameter in self.parameters.items() if isinstance(parameter, DTensor)}
        current = {name: shard.clone() for name, shard in shards.items()}
        replicated = {name: parameter.data for name, parameter in self.parameters.items() if name not in shards}
        with torch.no_grad():
            for name, shard in shards.items():
                shard.copy_(local_shard(self.copies[copy][name]))
        for name in replicated:
            self.parameters[name].data = self.copies[copy][name]
        try:
            yield
        finally:
            with torch.no_grad():
                for name, shard in shards.items():
                    shard.copy_(current[name])
            for name, data in replicated.items():
                self.parameters[name].data = data

    def state(self) -> dict[str, Tensor]:
        return {name: full_tensor(tensor) for name, tensor in super().state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        current = super().state()
        if state.keys() != current.keys():
            super().load(state)  # raises, with the names that differ
        for name, tensor in current.items():
            fill_shards(tensor, state[name])


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_shards(tensor: Tensor, content: Tensor) -> None:
    """Write the full ``content`` into ``tensor``, each rank its own shard. All ranks call it with the same content."""
    if isinstance(tensor, DTensor):
        content = content.to(tensor.device, tensor.dtype)
        # src_data_rank None: every rank already has the content, so nothing is sent.
        sharded = distribute_tensor(content, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(sharded.to_local())
    else:
        tensor.copy_(content)
