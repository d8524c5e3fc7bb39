"""The Fréchet distance between the Gaussian fits of two sets of feature vectors. FID (Heusel et al. 2017, arXiv 1706.08500) uses
Inception features, FD-DINOv2 (Stein et al. 2023, arXiv 2306.04675) uses DINOv2 features."""

import torch
from jaxtyping import Float
from torch import Tensor


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


def _moments(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and sample covariance (d, d), in fp64."""
    wide = vectors.detach().cpu().double()
    mean = wide.mean(dim=0)
    centred = wide - mean
    return mean, centred.T @ centred / (len(wide) - 1)
