"""Distances between two sets of feature vectors: the Fréchet distance between their Gaussian fits, and the squared maximum mean
discrepancy with a polynomial kernel.

In Inception features these are FID (Heusel et al. 2017, arXiv 1706.08500) and KID (Bińkowski et al. 2018, arXiv 1801.01401);
FD-DINOv2 (Stein et al. 2023, arXiv 2306.04675) uses DINOv2 features.
"""

import torch
from jaxtyping import Float
from torch import Tensor

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
