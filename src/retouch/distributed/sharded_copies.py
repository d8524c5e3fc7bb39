"""Weight copies of a model that FSDP2 has sharded, and conversions between sharded and whole tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from retouch.distributed.gathering import GatheredTensors, Part
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import local_shard
from retouch.policies.weights import WeightCopies


class ShardedCopies(WeightCopies):
    """Copies of sharded weights, with the same sharding.

    Sharded weights are swapped by content, because FSDP gathers from storage of its own that a parameter's ``data`` does not reach.
    Replicated weights are swapped by ``data``, because autograd may have saved them. ``state`` and ``load`` use whole tensors, of
    which ``state`` gathers one at a time. All ranks call them.
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
    """The tensors of ``state``, each gathered from its shards when it is read.

    ``like``: by name, the sharded weight of a plain tensor that is this rank's shard, such as a moment in CPU memory.
    """
    weights = {} if like is None else like
    return GatheredTensors({name: _part(tensor, ranks, like=weights.get(name, tensor)) for name, tensor in state.items()})


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_shards(tensor: Tensor, content: Tensor) -> None:
    """Write the whole ``content`` into ``tensor``, each rank its own shard of it."""
    shard = local_shard(tensor)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        first = mesh.get_local_rank() * _rows(tensor, mesh.size())
        content = content[first : first + shard.shape[0]]
    shard.copy_(content)


def _part(tensor: Tensor, ranks: Ranks, *, like: Tensor) -> Tensor | Part:
    if not isinstance(like, DTensor):
        return tensor.detach()
    each, total = _rows(like, ranks.world), like.shape[0]
    width = like.shape[1:].numel()
    counts = [width * max(0, min(each, total - rank * each)) for rank in range(ranks.world)]
    return Part(local_shard(tensor).reshape(-1), counts, like.shape, ranks)


def _rows(tensor: DTensor, world: int) -> int:
    """The rows of a shard. FSDP2 gives rows as ``torch.chunk`` does: as many to each rank, and fewer or none to the last ones."""
    assert tuple(tensor.placements) == (Shard(0),), f"weights are sharded as {tensor.placements}"
    return -(-tensor.shape[0] // world)
