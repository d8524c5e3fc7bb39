"""The kernel distance of two sets of vectors, against a double loop and against the moments of the distributions."""

import itertools

import pytest
import torch

from retouch.core import kernel_distance as module
from retouch.core.kernel_distance import kernel_distance


@pytest.mark.parametrize("rows", [2, 1024])
def test_kernel_distance_equals_the_formula(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", rows)
    random = torch.Generator().manual_seed(0)
    one, other = torch.randn(5, 4, generator=random), torch.randn(7, 4, generator=random) + 0.3

    def mean(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return sum((float((x.double() * y.double()).sum()) / 4 + 1) ** 3 for x, y in pairs) / len(pairs)

    within = [mean(list(itertools.permutations(each, 2))) for each in (one, other)]
    expected = sum(within) - 2 * mean(list(itertools.product(one, other)))
    assert kernel_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert kernel_distance(other, one) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("shift", "truth"), [(0.0, 0.0), (0.5, 3 * 0.5**2 + 3 * 0.25**2 + 1.625**2)])
def test_the_estimate_has_no_bias_for_small_sets(shift: float, truth: float) -> None:
    """For one feature, (x y + 1)³ = 1 + 3 x y + 3 x² y² + x³ y³, so the distance is 3 Δm1² + 3 Δm2² + Δm3² in the moments m of the
    distributions. Those of N(0.5, 1) are 0.5, 1.25 and 1.625, those of N(0, 1) are 0, 1 and 0."""
    random = torch.Generator().manual_seed(1)
    draws = torch.randn(4000, 2, 6, 1, generator=random)
    found = torch.tensor([kernel_distance(one, other + shift) for one, other in draws])
    error = found.std().item() / len(found) ** 0.5
    assert found.mean().item() == pytest.approx(truth, abs=3 * error)
    assert error < 0.5
    assert (found < 0).any()


def test_a_single_vector_raises() -> None:
    with pytest.raises(ValueError, match="1 and 3 vectors: the estimate needs at least two of each"):
        kernel_distance(torch.zeros(1, 2), torch.zeros(3, 2))
