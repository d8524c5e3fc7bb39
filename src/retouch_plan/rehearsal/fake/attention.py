"""Scaled dot-product attention on the fake accelerator, with the kernel that torch chooses on CUDA.

Without a mask and in 16 bits, this is FlashAttention (arXiv 2205.14135); with a mask or in fp32, the memory-efficient kernel, which
reads the mask as a tensor of the queries' dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retouch_plan.rehearsal.fake.tensors import FakeTensor

_aten = torch.ops.aten
_WIDEST_HEAD = 256
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside the context, ``torch.nn.functional.scaled_dot_product_attention`` uses a fused kernel for fake tensors. A function
    mode would not apply to the recomputation of checkpointed blocks, so the function itself is replaced."""
    own = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        return _attention(given) if isinstance(given["query"], FakeTensor) else own(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def _attention(given: dict[str, Any]) -> Tensor:
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    causal, scale = bool(given.get("is_causal", False)), given.get("scale")
    if key.shape[1] != query.shape[1]:  # grouped queries: FlashAttention reads the keys in place, the other kernel needs copies
        times = query.shape[1] // key.shape[1]
        if mask is None:
            key, value = (each[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for each in (key, value))
        else:
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    if mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _WIDEST_HEAD:
        made: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]
        return made
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, float("-inf"))
        mask = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    made = _aten._scaled_dot_product_efficient_attention(query, key, value, mask, needs_gradient, 0.0, causal, scale=scale)[0]
    return made
