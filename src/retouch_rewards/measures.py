"""Rank agreement of two judges on the same samples: scores (n,) and (n,), each on any scale. Computed in float64.

A sample with a missing score (NaN) from either judge is left out. The result is NaN if fewer than two samples remain, or if one
judge gives all of them the same score.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

_BRUTE_FORCE_LENGTH = 64


def spearman(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """Spearman's rho, -1 to 1: the Pearson correlation of the ranks, with mean ranks for ties (Spearman, 1904)."""
    a, b = _both(a, b)
    if len(a) < 2:
        return math.nan
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    spread = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / spread) if spread > 0 else math.nan


def kendall(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """Kendall's tau-b, -1 to 1: (concordant - discordant pairs) / sqrt(pairs untied in a * pairs untied in b) (Kendall, 1945).

    Takes O(n log(n)^2) time (Knight, 1966): with the samples sorted by a, a discordant pair is an inversion of b.
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
    discordant = _inversions(y[both.argsort()])
    return (pairs - tied_a - tied_b + tied_both - 2 * discordant) / math.sqrt(untied)


def pairwise_agreement(a: Float[Tensor, " n"], b: Float[Tensor, " n"], group: Int[Tensor, " n"]) -> tuple[float, int]:
    """The fraction, 0 to 1, of pairs within a group that both judges order the same way, and the number of pairs compared.

    Pairs that either judge ties are not compared; the fraction is NaN if none remain. Group-relative advantages depend on a judge
    through exactly these within-group orders.
    """
    agreeing = total = 0
    present = ~(a.isnan() | b.isnan())
    for number in set(group[present].tolist()):
        rows = present & (group == number)
        signs = _signs(a[rows]) * _signs(b[rows])
        agreeing += int((signs > 0).sum())
        total += int((signs != 0).sum())
    return (agreeing / total if total else math.nan), total // 2


def ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Ranks from 1 upwards; tied values get the mean of their ranks."""
    _, index, count = torch.unique(values, return_inverse=True, return_counts=True)
    mean_rank: Tensor = count.cumsum(0).double() - (count - 1) / 2
    return mean_rank[index]


def _both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    present = ~(a.isnan() | b.isnan())
    return a[present].double(), b[present].double()


def _tied(index: Int[Tensor, " n"]) -> int:
    """The number of pairs of equal values."""
    _, count = torch.unique(index, return_counts=True)
    return int((count * (count - 1) // 2).sum())


def _inversions(values: Int[Tensor, " n"]) -> int:
    """The number of pairs i < j with values[i] > values[j]."""
    if len(values) <= _BRUTE_FORCE_LENGTH:
        return int((values[:, None] > values[None, :]).triu().sum())
    left, right = values[: len(values) // 2], values[len(values) // 2 :]
    between = len(left) * len(right) - int(torch.searchsorted(left.sort().values, right.contiguous(), right=True).sum())
    return between + _inversions(left) + _inversions(right)


def _signs(values: Float[Tensor, " k"]) -> Float[Tensor, "k k"]:
    return (values[:, None] - values[None, :]).sign()


_ROWS = 1024  # rows of a kernel matrix at a time


def frechet_distance(one: Float[Tensor, "n d"], other: Float[Tensor, "m d"]) -> float:
    """|mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), with sample means and covariances, in fp64; at least 0.

    The distance depends on the number of vectors: compare only distances of sets of the same sizes. Raises ValueError for fewer
    than two vectors.

    Source: Dowson & Landau 1982 (the formula); Heusel et al. 2017, arXiv 1706.08500.
    """
    if min(len(one), len(other)) < 2:
        raise ValueError(f"{len(one)} and {len(other)} vectors: a covariance needs at least two of each")
    means, covariances = zip(*(_moments(vectors) for vectors in (one, other)), strict=True)
    # tr (S1 S2)^(1/2) is the sum of the square roots of the eigenvalues of R S2 R, which is symmetric; R is the square root of S1.
    values, vectors = torch.linalg.eigh(covariances[0])
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp_min(0).sqrt().sum()
    traces = covariances[0].trace() + covariances[1].trace()
    return max(0.0, float((means[0] - means[1]).square().sum() + traces - 2 * mixed))


def kernel_distance(one: Float[Tensor, "n d"], other: Float[Tensor, "m d"]) -> float:
    """mean k(x, x') over pairs of different rows + mean k(y, y') - 2 mean k(x, y), with k(x, y) = (x · y / d + 1)³, in fp64.

    The estimate is unbiased for any number of vectors, so it can be below 0 for sets from the same distribution. Raises ValueError
    for fewer than two vectors.

    Source: Gretton et al. 2012, JMLR 13, lemma 6; the kernel is that of Bińkowski et al. 2018, arXiv 1801.01401.
    """
    if min(len(one), len(other)) < 2:
        raise ValueError(f"{len(one)} and {len(other)} vectors: the estimate needs at least two of each")
    x, y = (vectors.detach().cpu().double() for vectors in (one, other))
    return _within(x) + _within(y) - 2 * _total(x, y) / (len(x) * len(y))


def _moments(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and sample covariance (d, d), in fp64."""
    wide = vectors.detach().cpu().double()
    mean = wide.mean(dim=0)
    centred = wide - mean
    return mean, centred.T @ centred / (len(wide) - 1)


def _within(vectors: Tensor) -> float:
    """The mean kernel over pairs of different rows."""
    diagonal = _kernel(vectors.square().sum(dim=1), vectors.shape[1]).sum()
    return (_total(vectors, vectors) - float(diagonal)) / (len(vectors) * (len(vectors) - 1))


def _total(x: Tensor, y: Tensor) -> float:
    return sum(float(_kernel(rows @ y.T, x.shape[1]).sum()) for rows in x.split(_ROWS))


def _kernel(products: Tensor, size: int) -> Tensor:
    return (products / size + 1) ** 3
