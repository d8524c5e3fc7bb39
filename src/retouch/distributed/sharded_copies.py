"""Weight copies of a model that FSDP2 has sharded, and conversions between sharded and full tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from retouch.distributed.gathering import GatheredTensors, TensorShard
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import local_shard
from retouch.policies.weights import WeightCopies


class ShardedCopies(WeightCopies):
    """Copies of sharded weights, with the same sharding.

    Sharded weights are swapped by copying values, because FSDP gathers from its own storage, which assigning a parameter's ``data``
    does not change. Replicated weights are swapped by assigning ``data``, because autograd may have saved them. ``state`` and
    ``load`` use full tensors; ``state`` gathers one tensor at a time. All ranks must call them.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(module)
        self.ranks = ranks

    @torch.no_grad()
    def update_ema(self, copy: str, decay: float) -> None:
        for name, parameter in self.parameters.items():
            average = local_shard(self.copies[copy][name])
            average.lerp_(local_shard(parameter).to(average.dtype), 1.0 - decay)

    @contextmanager
    def using(self, copy: str) -> Iterator[None]:
        shards = {name: local_shard(parameter) for name, parameter in self.parameters.items() if isinstance(parameter, DTensor)}
        current = {name: shard.clone() for name, shard in shards.items()}
        replicated = {name: parameter.data for name, parameter in self.parameters.items() if name not in shards}
        with torch.no_grad():
            for name, shard in shards.items():
                shard.copy_(local_shard(self.copies[copy][name]))
        for name in replicated:
            self.parameters[name].data = self.copies[copy][name].to(self.parameters[name].dtype)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, shard in shards.items():
                    shard.copy_(current[name])
            for name, data in replicated.items():
                self.parameters[name].data = data

    def state(self) -> Mapping[str, Tensor]:
        return gathered_state(super().state(), self.ranks)

    def load(self, state: Mapping[str, Tensor]) -> None:
        current = super().state()
        if state.keys() != current.keys():
            super().load(state)  # raises, with the names that differ
        for name, tensor in current.items():
            fill_shards(tensor, state[name])


def gathered_state(state: Mapping[str, Tensor], ranks: Ranks, *, like: Mapping[str, Tensor] | None = None) -> GatheredTensors:
    """Return the tensors of ``state``, each gathered from its shards when it is read.

    ``like``: the sharded weights of plain tensors that hold this rank's shard (such as moments in CPU memory), by tensor name.
    """
    weights = {} if like is None else like
    return GatheredTensors({name: _part(tensor, ranks, like=weights.get(name, tensor)) for name, tensor in state.items()})


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor from all ranks. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_shards(tensor: Tensor, content: Tensor) -> None:
    """Write the full tensor ``content`` into ``tensor``; each rank writes its own shard."""
    shard = local_shard(tensor)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        first = mesh.get_local_rank() * _rows(tensor, mesh.size())
        content = content[first : first + shard.shape[0]]
    shard.copy_(content)


def _part(tensor: Tensor, ranks: Ranks, *, like: Tensor) -> Tensor | TensorShard:
    if not isinstance(like, DTensor):
        return tensor.detach()
    each, total = _rows(like, ranks.world), like.shape[0]
    width = like.shape[1:].numel()
    counts = [width * max(0, min(each, total - rank * each)) for rank in range(ranks.world)]
    return TensorShard(local_shard(tensor).reshape(-1), counts, like.shape, ranks)


def _rows(tensor: DTensor, world: int) -> int:
    """Return the number of rows per shard. FSDP2 splits like ``torch.chunk``: the last ranks may get fewer rows or none."""
    assert tuple(tensor.placements) == (Shard(0),), f"weights are sharded as {tensor.placements}"
    return -(-tensor.shape[0] // world)
