"""Agreement of judges, against the definitions pair by pair, published values and closed forms."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.measures import kendall, pairwise_agreement, spearman

NAN = float("nan")
# Pairs of scores with few distinct values, so that there are ties and both lists have the same length.
SCORES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=40)


def column(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def tau_by_pairs(a, b) -> float:
    """(C - D) / sqrt((C + D + ties of b alone) (C + D + ties of a alone)), counted."""
    alike = otherwise = only_a = only_b = 0
    for i in range(len(a)):
        for j in range(i):
            x, y = (a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])
            alike += x * y > 0
            otherwise += x * y < 0
            only_a += x == 0 and y != 0
            only_b += y == 0 and x != 0
    under = (alike + otherwise + only_a) * (alike + otherwise + only_b)
    return (alike - otherwise) / math.sqrt(under) if under else NAN


def rho_by_definition(a, b) -> float:
    """Pearson's correlation of mean ranks, in fractions."""

    def mean_ranks(values):
        return [Fraction(sum(v < value for v in values) * 2 + values.count(value) + 1, 2) for value in values]

    x, y = mean_ranks(a), mean_ranks(b)
    x, y = [v - sum(x) / len(x) for v in x], [v - sum(y) / len(y) for v in y]
    under = sum(v * v for v in x) * sum(v * v for v in y)
    return float(sum(p * q for p, q in zip(x, y, strict=True))) / math.sqrt(under) if under else NAN


@given(SCORES)
def test_kendall_tau_b_equals_its_definition_by_pairs(pairs):
    a, b = [list(side) for side in zip(*pairs, strict=True)]
    assert kendall(column(a), column(b)) == pytest.approx(tau_by_pairs(a, b), abs=1e-12, nan_ok=True)


@given(SCORES)
def test_spearman_rho_equals_the_correlation_of_mean_ranks(pairs):
    a, b = [list(side) for side in zip(*pairs, strict=True)]
    assert spearman(column(a), column(b)) == pytest.approx(rho_by_definition(a, b), abs=1e-12, nan_ok=True)


def test_kendall_tau_b_of_many_samples_equals_its_definition_by_pairs():
    """Past the size at which pairs are counted one by one."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 40, (700,), generator=generator)
    b = (a + torch.randint(0, 30, (700,), generator=generator)) // 2
    assert kendall(a.float(), b.float()) == pytest.approx(tau_by_pairs(a.tolist(), b.tolist()), abs=1e-12)


def test_correlation_is_1_for_equal_orders_and_minus_1_for_reversed_orders():
    a = column([3.0, 1.0, 2.0, 9.0])
    for measure in (spearman, kendall):
        assert measure(a, a.exp()) == pytest.approx(1)
        assert measure(a, -a) == pytest.approx(-1)
        assert math.isnan(measure(a, torch.ones(4)))
        assert math.isnan(measure(a[:1], a[:1]))


def test_samples_with_a_missing_score_are_left_out():
    a, b = column([3, NAN, 1, 2, 5, 4]), column([2, 9, 1, NAN, 4, 5])
    kept = [0, 2, 4, 5]
    for measure in (spearman, kendall):
        assert measure(a, b) == measure(a[kept], b[kept])
    group = torch.zeros(6, dtype=torch.long)
    assert pairwise_agreement(a, b, group) == pairwise_agreement(a[kept], b[kept], group[kept])


def test_pairs_are_compared_only_within_a_group():
    a = column([1, 2, 10, 11, 5, 5])
    b = column([2, 1, 30, 40, 1, 2])
    group = torch.tensor([7, 7, 3, 3, 4, 4])
    share, pairs = pairwise_agreement(a, b, group)
    assert (share, pairs) == (0.5, 2)  # one pair reversed, one in the same order, one tied
    assert math.isnan(pairwise_agreement(a[4:], b[4:], group[4:])[0])
