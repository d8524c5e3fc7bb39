"""The whole weights of a sharded model: gathered for checkpoints and exports, and copies of them.

Gathers sharded state one tensor at a time. During a gather, a device holds only one rank's part of the tensor at a time.

Every rank holds a contiguous part of each tensor, in row-major order: some rows of a tensor that FSDP2 has sharded, or a slice of
ZeRO's concatenated weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retouch.distributed.ranks import Ranks


@dataclass(frozen=True, eq=False)
class TensorShard:
    """This rank's part of a tensor.

    ``local``: the elements of the part, (counts[rank],). ``counts``: the number of elements on each rank. ``shape``: the shape of
    the full tensor.
    """

    local: Tensor
    counts: Sequence[int]
    shape: torch.Size
    ranks: Ranks

    def gather(self) -> Tensor:
        """Return the full tensor, in CPU memory. Every rank must call ``gather`` or ``send``."""
        whole = torch.empty(self.shape, dtype=self.local.dtype)
        pieces = whole.view(-1).split(list(self.counts))
        for piece, content in zip(pieces, self.ranks.parts(self.local, self.counts), strict=True):
            piece.copy_(content)
        return whole

    def send(self) -> None:
        """Take part in the ``gather`` of another rank, without a copy in this rank's CPU memory."""
        for _ in self.ranks.parts(self.local, self.counts):
            pass


class GatheredTensors(Mapping[str, Tensor]):
    """Tensors by name. Each read gathers the tensor's current values; the result is not kept, so a later read may differ.

    All ranks must read the same tensors in the same order. A rank that needs no values calls ``send_unread`` instead, if the other
    ranks read in the order of ``in_file_order``.
    """

    def __init__(self, tensors: Mapping[str, Tensor | TensorShard]) -> None:
        self.tensors = dict(tensors)
        self._unread = {name for name, tensor in tensors.items() if isinstance(tensor, TensorShard)}

    def __getitem__(self, name: str) -> Tensor:
        self._unread.discard(name)
        tensor = self.tensors[name]
        return tensor.gather() if isinstance(tensor, TensorShard) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def send_unread(self) -> None:
        """Take part in the other ranks' gathers of every tensor that this rank has not read."""
        for name in in_file_order(self):
            part = self.tensors[name]
            if isinstance(part, TensorShard) and name in self._unread:
                part.send()
        self._unread.clear()


def ungathered(state: Mapping[str, Tensor]) -> Mapping[str, Tensor | TensorShard]:
    """Return the tensors of a state as this rank holds them, without gathering."""
    return state.tensors if isinstance(state, GatheredTensors) else state


def merged(*states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Merge the tensors of several states, without gathering."""
    tensors = {name: tensor for state in states for name, tensor in ungathered(state).items()}
    return GatheredTensors(tensors)


def forms(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and full shape of every tensor, without gathering."""
    held = ungathered(state)
    return {name: ((each.local if isinstance(each, TensorShard) else each).dtype, each.shape) for name, each in held.items()}


def in_file_order(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names, those of the widest dtypes first, so that every tensor in a file is aligned."""
    found = forms(state)
    return sorted(found, key=lambda name: (-found[name][0].itemsize, str(found[name][0]), name))
