"""The Fréchet distance of two sets of vectors, against the eigenvalues of the product and in closed form."""

import numpy as np
import pytest
import torch

from retouch.core.frechet import frechet_distance


def vectors(count: int, width: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, width, generator=random) @ torch.randn(width, width, generator=random)
    return mixed + shift


@pytest.mark.parametrize(("count", "width"), [(40, 6), (5, 8), (300, 3)])
def test_frechet_distance_equals_the_formula_with_eigenvalues(count: int, width: int) -> None:
    one, other = vectors(count, width, 0), vectors(count + 3, width, 1, 0.5)
    first, second = (np.cov(each.double().numpy(), rowvar=False) for each in (one, other))
    means = np.square(one.double().numpy().mean(0) - other.double().numpy().mean(0)).sum()
    roots = np.sqrt(np.linalg.eigvals(first @ second).astype(complex)).real
    wanted = means + np.trace(first) + np.trace(second) - 2 * roots.sum()
    assert frechet_distance(one, other) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one), rel=1e-6)


def test_frechet_distance_of_1d_gaussians_equals_the_closed_form() -> None:
    one, other = vectors(50, 1, 0), vectors(50, 1, 1, 2.0)
    means, deviations = (one.mean() - other.mean()).item(), (one.std() - other.std()).item()
    assert frechet_distance(one, other) == pytest.approx(means**2 + deviations**2, rel=1e-5)


def test_frechet_distance_of_equal_sets_is_0_and_a_single_vector_raises() -> None:
    same = vectors(30, 5, 2)
    assert frechet_distance(same, same.flip(0)) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="at least two of each"):
        frechet_distance(same[:1], same)
