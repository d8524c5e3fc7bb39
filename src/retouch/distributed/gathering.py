"""State that is spread over ranks, gathered one tensor at a time: while a tensor is gathered, a device holds one rank's part of it.

Every rank holds a contiguous part of each tensor, in row-major order: rows of a tensor that FSDP2 has sharded, a slice of the
concatenated weights of ZeRO.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retouch.distributed.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a tensor.

    ``local``: its elements, (counts[rank],). ``counts``: the number of elements on each rank. ``shape``: that of the whole tensor.
    """

    local: Tensor
    counts: Sequence[int]
    shape: torch.Size
    ranks: Ranks

    def gather(self) -> Tensor:
        """The whole tensor, in CPU memory. All ranks call it or ``send``."""
        whole = torch.empty(self.shape, dtype=self.local.dtype)
        pieces = whole.view(-1).split(list(self.counts))  # type: ignore[no-untyped-call]
        for piece, content in zip(pieces, self.ranks.parts(self.local, self.counts), strict=True):
            piece.copy_(content)
        return whole

    def send(self) -> None:
        """Take part in the ``gather`` of another rank, without a copy in this rank's CPU memory."""
        for _ in self.ranks.parts(self.local, self.counts):
            pass


class GatheredTensors(Mapping[str, Tensor]):
    """Tensors by name, each gathered when it is read and not kept. Reading twice gives the values of two moments.

    All ranks must read the same tensors in the same order. A rank that needs no values calls ``send_unread`` instead, where the
    others read in the order of ``in_file_order``.
    """

    def __init__(self, tensors: Mapping[str, Tensor | Part]) -> None:
        self.tensors = dict(tensors)
        self._unread = {name for name, tensor in tensors.items() if isinstance(tensor, Part)}

    def __getitem__(self, name: str) -> Tensor:
        self._unread.discard(name)
        tensor = self.tensors[name]
        return tensor.gather() if isinstance(tensor, Part) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def send_unread(self) -> None:
        """Take part in gathering, for other ranks, every tensor that this rank has not read."""
        for name in in_file_order(self):
            part = self.tensors[name]
            if isinstance(part, Part) and name in self._unread:
                part.send()
        self._unread.clear()


def ungathered(state: Mapping[str, Tensor]) -> Mapping[str, Tensor | Part]:
    """The tensors of a state as this rank holds them, without gathering any."""
    return state.tensors if isinstance(state, GatheredTensors) else state


def merged(*states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of several states, without gathering any."""
    tensors = {name: tensor for state in states for name, tensor in ungathered(state).items()}
    return GatheredTensors(tensors)


def forms(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape of every tensor, without gathering any."""
    held = ungathered(state)
    return {name: ((each.local if isinstance(each, Part) else each).dtype, each.shape) for name, each in held.items()}


def in_file_order(state: Mapping[str, Tensor]) -> list[str]:
    """The names, those of the widest types first, so that every tensor in a file is aligned."""
    found = forms(state)
    return sorted(found, key=lambda name: (-found[name][0].itemsize, str(found[name][0]), name))
