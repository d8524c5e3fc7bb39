"""Tensors whose axis 0 is rows, and the (b,) columns that belong to them."""

from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

Reduction: TypeAlias = Literal["mean", "sum"]


def reduce_rows(x: Float[Tensor, "b ..."], reduction: Reduction) -> Float[Tensor, " b"]:
    """Mean or sum over every axis but the first. ``x`` has at least two axes."""
    flat = x.flatten(1)
    if reduction == "mean":
        return flat.mean(1)
    if reduction == "sum":
        return flat.sum(1)
    raise ValueError(f"reduction {reduction!r}: choose 'mean' or 'sum'")


def per_row(column: Float[Tensor, " b"], like: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """The column as (b, 1, ..., 1), so that it multiplies the rows of ``like``."""
    return column.view(-1, *(1,) * (like.ndim - 1))
