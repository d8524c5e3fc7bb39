"""Distances of two sets of vectors: the Fréchet distance against the eigenvalues of the product and in closed form, the kernel
distance against a double loop and against the moments of the distributions."""

import itertools

import numpy as np
import pytest
import torch

from retouch.core.measures import frechet_distance, kernel_distance


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


def test_frechet_distance_of_equal_sets_is_0_and_a_single_vector_raises() -> None:
    same = vectors(30, 5, 2)
    assert frechet_distance(same, same.flip(0)) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="at least two of each"):
        frechet_distance(same[:1], same)


@pytest.mark.parametrize("rows", [2, 1024])
def test_kernel_distance_equals_the_formula(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch.core.measures._ROWS", rows)
    random = torch.Generator().manual_seed(0)
    one, other = torch.randn(5, 4, generator=random), torch.randn(7, 4, generator=random) + 0.3

    def mean(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return sum((float((x.double() * y.double()).sum()) / 4 + 1) ** 3 for x, y in pairs) / len(pairs)

    within = [mean(list(itertools.permutations(each, 2))) for each in (one, other)]
    expected = sum(within) - 2 * mean(list(itertools.product(one, other)))
    assert kernel_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert kernel_distance(other, one) == pytest.approx(expected, rel=1e-9)


def test_the_kernel_distance_of_a_single_vector_raises() -> None:
    with pytest.raises(ValueError, match="1 and 3 vectors: the estimate needs at least two of each"):
        kernel_distance(torch.zeros(1, 2), torch.zeros(3, 2))
