"""Models ``policy.compile: regional`` in a rehearsal: elementwise kernels of compiled blocks count as fused.

The kernels between two matrix products or attentions of a block count as one kernel. It reads each tensor from outside once, and
writes the tensors that are still held when it ends. Inductor orders kernels more freely, and does not keep tensors that only Python
variables hold, so this is a conservative estimate. The tensors that a compiled block keeps for its backward pass are not
estimated.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from retouch_plan.rehearsal.fake.tensors import DEVICE, FakeTensor

_aten = torch.ops.aten
_REDUCTIONS = (
    *(_aten.mean, _aten.sum, _aten.var, _aten.var_mean, _aten.amax, _aten.linalg_vector_norm),
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten._fused_rms_norm, _aten._fused_rms_norm_backward),
)
_MOVES = (_aten._to_copy, _aten.copy_, _aten.clone, _aten.cat, _aten.stack, _aten.slice_backward, _aten.select_backward)


def is_fusible(func: Any, tensors: Iterable[FakeTensor]) -> bool:
    """Return whether torch.compile fuses an operation with its neighbours.

    It fuses elementwise operations, reductions, and copies on the device, except those on complex numbers, for which Inductor
    generates no code.
    """
    known = torch.Tag.pointwise in func.tags or func.overloadpacket in (*_REDUCTIONS, *_MOVES)
    return known and not any(tensor.dtype.is_complex for tensor in tensors)


class FusedKernel:
    """Several operations that count as one kernel. ``reads``: the bytes that it reads from tensors made outside."""

    def __init__(self) -> None:
        self.reads = 0
        self._read: set[int] = set()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, given: Iterable[FakeTensor], made: Iterable[FakeTensor]) -> None:
        """Add an operation that reads ``given`` and writes ``made``, which may be the same tensor."""
        for tensor in given:
            storage = tensor.meta.untyped_storage()
            key = storage._cdata
            own = self._made.get(key)
            if tensor.device.type != DEVICE or key in self._read or (own is not None and own() is storage):
                continue
            self._read.add(key)
            self.reads += min(tensor.numel() * tensor.element_size(), storage.nbytes())
        for tensor in made:
            storage = tensor.meta.untyped_storage()
            self._made[storage._cdata] = weakref.ref(storage)

    def bytes(self) -> int:
        """Return the bytes that the kernel reads, plus those that it writes to tensors that are still held."""
        held = (storage() for storage in self._made.values())
        return self.reads + sum(storage.nbytes() for storage in held if storage is not None)


class Compiled:
    """Is true while a compiled block, or a backward pass through one, runs. ``on_leave``: called after a block's forward pass."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave = on_leave
        self._depth = 0
        self._any = False

    def __bool__(self) -> bool:
        return self._depth > 0 or (self._any and torch._C._current_graph_task_id() != -1)

    def watch(self, module: nn.Module) -> None:
        """Watch the blocks of a model that ``models.common.kernels.compile_blocks`` would compile."""
        names = getattr(module, "_repeated_blocks", None) or getattr(module, "_no_split_modules", None) or ()
        for block in module.modules():
            if any(kind.__name__ in names for kind in type(block).__mro__):  # FSDP2 derives its own classes
                self._watch(block)

    def _watch(self, block: nn.Module) -> None:
        self._any = True
        forward = block.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("past_key_values") is not None:
                return forward(*args, **kwargs)
            with self._inside():
                return forward(*args, **kwargs)

        block.forward = watched

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._on_leave()
