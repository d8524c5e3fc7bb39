"""How many bytes of tensors are alive at once while something is computed: found by computing it on the meta device, where tensors
have shapes and no numbers, so that the largest published models take seconds on any machine.

It is what a device's allocator is asked for. Workspaces of kernels, rounding to blocks and fragmentation come on top. Attention
counts as fused kernels do it: no table of all pairs of tokens.
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


class Live(TorchDispatchMode):
    """Counts what operations inside it make. ``given``: tensors that were there before, which are not counted.

    ``now``: bytes that are alive; ``most``: the highest that was.
    """

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.most = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return made


class FusedAttention(TorchFunctionMode):
    """Scaled dot-product attention as flash kernels compute it: their outputs and what they keep for the backward pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        return _Attention.apply(given["query"], given["key"], given["value"])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def most_alive(compute: Callable[[], Any], *, given: Iterable[Tensor] = ()) -> int:
    """The highest number of bytes that are alive while ``compute`` runs, apart from those of ``given``."""
    with Live(given) as live, FusedAttention():
        compute()
    return live.most


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module, its parameters in another type."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module
