"""The squared maximum mean discrepancy of two sets of feature vectors with a polynomial kernel: KID (Bińkowski et al. 2018,
arXiv 1801.01401) in Inception features."""

from jaxtyping import Float
from torch import Tensor

_ROWS = 1024  # rows of a kernel matrix at a time


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


def _within(vectors: Tensor) -> float:
    """The mean kernel over pairs of different rows."""
    diagonal = _kernel(vectors.square().sum(dim=1), vectors.shape[1]).sum()
    return (_total(vectors, vectors) - float(diagonal)) / (len(vectors) * (len(vectors) - 1))


def _total(x: Tensor, y: Tensor) -> float:
    return sum(float(_kernel(rows @ y.T, x.shape[1]).sum()) for rows in x.split(_ROWS))


def _kernel(products: Tensor, size: int) -> Tensor:
    return (products / size + 1) ** 3
