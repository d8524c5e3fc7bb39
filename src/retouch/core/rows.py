"""Reductions to (b,) and broadcasts from (b,) for tensors whose axis 0 is rows."""

from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

Reduction: TypeAlias = Literal["mean", "sum"]


def reduce_rows(x: Float[Tensor, "b ..."], reduction: Reduction) -> Float[Tensor, " b"]:
    """Mean or sum over every axis except the first: (b, ...) with at least two axes to (b,)."""
    flat = x.flatten(1)
    if reduction == "mean":
        return flat.mean(1)
    if reduction == "sum":
        return flat.sum(1)
    raise ValueError(f"reduction {reduction!r}: choose 'mean' or 'sum'")


def append_dims(column: Float[Tensor, " b"], like: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Reshape (b,) to (b, 1, ..., 1) with as many axes as ``like``, so that it broadcasts over rows."""
    return column.view(-1, *(1,) * (like.ndim - 1))
