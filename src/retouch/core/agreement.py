"""How far two judges order the same samples alike: scores (n,) and (n,), of any scales.

A pair of scores of which one is missing (NaN) takes no part. NaN comes back where nothing can be said: fewer than two samples, or
a judge that scores them all the same. float64.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

_FEW = 64


def spearman(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """Spearman's rho, -1 to 1: the correlation of the ranks, equal scores sharing the mean of theirs."""
    a, b = _both(a, b)
    if len(a) < 2:
        return math.nan
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    spread = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / spread) if spread > 0 else math.nan


def kendall(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """Kendall's tau-b, -1 to 1: (pairs ordered alike - pairs ordered otherwise) / sqrt(pairs untied in a * pairs untied in b).

    In n log(n)^2 steps (Knight, 1966): with the samples in the order of a, a pair ordered otherwise is an inversion of b.
    """
    a, b = _both(a, b)
    pairs = len(a) * (len(a) - 1) // 2
    _, x = torch.unique(a, return_inverse=True)
    _, y = torch.unique(b, return_inverse=True)
    both = x * len(b) + y
    tied_a, tied_b, tied_both = _tied(x), _tied(y), _tied(both)
    untied = (pairs - tied_a) * (pairs - tied_b)
    if untied == 0:
        return math.nan
    otherwise = _inversions(y[both.argsort()])
    return (pairs - tied_a - tied_b + tied_both - 2 * otherwise) / math.sqrt(untied)


def ordered_alike(a: Float[Tensor, " n"], b: Float[Tensor, " n"], group: Int[Tensor, " n"]) -> tuple[float, int]:
    """Of the pairs within a group that neither judge ties, the share that both order alike, and how many such pairs there are.

    This is what group-relative advantages feel of a judge.
    """
    alike = total = 0
    present = ~(a.isnan() | b.isnan())
    for number in set(group[present].tolist()):
        rows = present & (group == number)
        signs = _signs(a[rows]) * _signs(b[rows])
        alike += int((signs > 0).sum())
        total += int((signs != 0).sum())
    return (alike / total if total else math.nan), total // 2


def ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    middle: Tensor = count.cumsum(0).double() - (count - 1) / 2
    return middle[place]


def _both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    present = ~(a.isnan() | b.isnan())
    return a[present].double(), b[present].double()


def _tied(index: Int[Tensor, " n"]) -> int:
    """Pairs of equal values."""
    _, count = torch.unique(index, return_counts=True)
    return int((count * (count - 1) // 2).sum())


def _inversions(values: Int[Tensor, " n"]) -> int:
    """Pairs i < j with a greater value at i."""
    if len(values) <= _FEW:
        return int((values[:, None] > values[None, :]).triu().sum())
    left, right = values[: len(values) // 2], values[len(values) // 2 :]
    between = len(left) * len(right) - int(torch.searchsorted(left.sort().values, right.contiguous(), right=True).sum())
    return between + _inversions(left) + _inversions(right)


def _signs(values: Float[Tensor, " k"]) -> Float[Tensor, "k k"]:
    return (values[:, None] - values[None, :]).sign()
