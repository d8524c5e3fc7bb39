"""The peak memory of a computation, measured by running it on the meta device. Tensors there have shapes but no data, so even the
largest published models take only seconds.

The result is the memory requested from the allocator. Workspaces of kernels, rounding to blocks and fragmentation are not included.
Attention is counted as in fused kernels (FlashAttention, arXiv 2205.14135), which do not store the matrix of all pairs of tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create inside this context. ``existing``: tensors that are not counted.

    ``current``: bytes of the tensors that exist now; ``peak``: the maximum so far.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def current(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._existing:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.current)
        return result


class FusedAttention(TorchFunctionMode):
    """Replaces scaled dot-product attention by tensors of the sizes that flash kernels allocate and keep for the backward pass.

    Source: FlashAttention (Dao et al. 2022, arXiv 2205.14135).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        inputs = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        return _Attention.apply(inputs["query"], inputs["key"], inputs["value"])  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def peak_bytes(compute: Callable[[], Any], *, existing: Iterable[Tensor] = ()) -> int:
    """Peak memory of the tensors that ``compute`` creates, in bytes. Tensors in ``existing`` are not counted."""
    with PeakMemory(existing) as memory, FusedAttention():
        compute()
    return memory.peak


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the module's parameters, not its buffers, to ``dtype`` in place; returns the module."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module
