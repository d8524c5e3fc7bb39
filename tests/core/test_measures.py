"""Intervals, agreement of judges and distances of sets, against definitions and values computed by hand."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.intervals import MeanEstimate, estimate_mean, estimate_share
from retouch_rewards.measures import frechet_distance, kendall, kernel_distance, pairwise_agreement, spearman

# Clustered intervals of means and shares


def test_a_mean_of_independent_values_has_the_usual_t_interval() -> None:
    """1, 2, 3, 6: mean 3, standard deviation sqrt(14 / 3); t(3) = 3.18245."""
    found = estimate_mean([1.0, 2.0, 3.0, math.nan, 6.0], [""] * 5)
    error = math.sqrt(14 / 3) / 2
    assert (found.mean, found.count, found.clusters) == (3.0, 4, 4)
    assert found.error == pytest.approx(error)
    assert found.half_width == pytest.approx(3.18245 * error, abs=1e-2)
    assert found.sigmas == pytest.approx(3 / error)
    assert estimate_mean([1.0, 2.0, 3.0, 6.0], list("abcd")) == found


def test_a_mean_of_one_cluster_has_no_interval_and_a_mean_of_no_values_is_nan() -> None:
    one, none = estimate_mean([1.0, 2.0], ["a", "a"]), estimate_mean([math.nan], ["a"])
    assert (one.mean, one.interval, one.sigmas, one.clusters_for_significance) == (1.5, None, 0.0, None)
    assert math.isnan(none.mean)
    assert math.isnan(none.sigmas)
    assert (none.interval, none.count, none.clusters) == (None, 0, 0)
    assert estimate_mean([0.5, 0.5], list("ab")).sigmas == math.inf
    assert estimate_mean([-0.5, -0.5], list("ab")).sigmas == -math.inf
    assert estimate_mean([-1.0, 1.0], [""] * 2).clusters_for_significance is None
    assert estimate_mean([1.0, 1.0], list("ab")).clusters_for_significance == 2


@pytest.mark.parametrize("scale", [0.1, 0.4, -0.4, 2.0])
def test_the_number_of_clusters_for_significance_is_the_smallest_whose_interval_excludes_0(scale: float) -> None:
    found = estimate_mean([scale + value for value in (-1.0, -0.5, 0.5, 1.0)], [""] * 4)
    needed = found.clusters_for_significance

    def includes_0(clusters: int) -> bool:
        return abs(found.mean) <= MeanEstimate(found.mean, found.error * math.sqrt(4 / clusters), clusters, clusters).half_width

    assert needed is not None
    assert not includes_0(needed)
    assert needed == 2 or includes_0(needed - 1)
    assert includes_0(4) == (needed > 4)


@pytest.mark.parametrize("clusters", [10])
def test_intervals_of_clustered_means_have_95_percent_coverage(clusters: int) -> None:
    """Four tasks for each source, with two thirds of the variance between sources. Without clusters, intervals are too narrow."""
    random = np.random.default_rng(clusters)
    names = [str(number) for number in range(clusters) for _ in range(4)]
    runs, hits, samples = 4000, 0, []
    for _ in range(runs):
        values = (np.repeat(random.normal(size=clusters), 4) * math.sqrt(2) + random.normal(size=4 * clusters)).tolist()
        low, high = estimate_mean(values, names).interval
        hits += low <= 0 <= high
        if len(samples) < 500:
            samples.append(values)
    naive = [low <= 0 <= high for low, high in (estimate_mean(values, [""] * len(values)).interval for values in samples)]
    assert abs(hits / runs - 0.95) < 0.012
    assert sum(naive) / len(naive) < 0.85


@pytest.mark.parametrize("values", [[0.0] * 7 + [1.0], [9.9] * 11 + [4.0], [-1.0, 0.0, 0.0, 0.0] * 3])
def test_intervals_stay_within_the_range_of_the_values_and_need_8_clusters(values: list[float]) -> None:
    low, high = estimate_mean(values).interval or (math.nan, math.nan)
    assert min(values) <= low < estimate_mean(values).mean < high <= max(values)
    assert estimate_mean(values, list("aabcdefghijk")[: len(values)]).interval is None or len(values) > 8
    assert estimate_mean(values[-7:]).interval is None


def test_intervals_of_shares_match_published_tables_and_hand_computations() -> None:
    """Wilson's interval of 7 of 10 (Newcombe 1998, method 3). Then two tasks with opposite votes: v = 2 x (1 + 1) / 16 = p (1 - p),
    so the effective size is 1; half = t / (2 sqrt(1 + t^2)). Then unanimous votes, one cluster, and no votes."""
    found = estimate_share([1.0] * 7 + [0.0] * 3, list("abcdefghij"))
    assert (found.value, found.count, found.clusters) == (pytest.approx(0.7), 10, 10)
    assert (found.low, found.high) == (pytest.approx(0.3968, abs=1e-4), pytest.approx(0.8922, abs=1e-4))
    found, t = estimate_share([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"]), 12.7062
    assert found.low == pytest.approx(0.5 - t / (2 * math.sqrt(1 + t * t)), abs=1e-5)
    assert found.high == pytest.approx(1 - found.low)
    won = estimate_share([1.0] * 8, list("abcdabcd"))
    assert (won.value, won.high) == (1.0, 1.0)
    assert won.low == pytest.approx(1 / (1 + 3.18245**2 / 4), abs=1e-3)  # Wilson's for 4 of 4, t(3)
    one = estimate_share([1.0, 0.0], ["a", "a"])
    assert (one.value, one.low, one.high) == (0.5, 0.0, 1.0)
    assert math.isnan(estimate_share([], []).value)


@pytest.mark.parametrize(("tasks", "votes", "mean"), [(15, 4, 0.5)])
def test_intervals_of_clustered_shares_have_95_percent_coverage(tasks: int, votes: int, mean: float) -> None:
    """Tasks differ in how often the arm wins, so votes on one task are correlated. One answer in five is a tie."""
    random = np.random.default_rng(7)
    clusters = [str(task) for task in range(tasks) for _ in range(votes)]
    covered = 0
    for _ in range(2000):
        rates = random.beta(4 * mean, 4 * (1 - mean), size=tasks).repeat(votes)
        won = (random.uniform(size=tasks * votes) < rates).astype(float)
        won[random.uniform(size=tasks * votes) < 0.2] = 0.5
        found = estimate_share(won.tolist(), clusters)
        covered += found.low <= 0.8 * mean + 0.1 <= found.high
    assert 0.93 <= covered / 2000 <= 0.97


# Agreement of judges, against the definitions pair by pair, published values and closed forms

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
def test_rank_correlations_equal_their_definitions(pairs):
    a, b = [list(side) for side in zip(*pairs, strict=True)]
    assert kendall(column(a), column(b)) == pytest.approx(tau_by_pairs(a, b), abs=1e-12, nan_ok=True)
    assert spearman(column(a), column(b)) == pytest.approx(rho_by_definition(a, b), abs=1e-12, nan_ok=True)


def test_kendall_tau_b_of_many_samples_equals_its_definition_by_pairs():
    """Past the size at which pairs are counted one by one."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 40, (700,), generator=generator)
    b = (a + torch.randint(0, 30, (700,), generator=generator)) // 2
    assert kendall(a.float(), b.float()) == pytest.approx(tau_by_pairs(a.tolist(), b.tolist()), abs=1e-12)


def test_correlation_is_1_for_equal_orders_and_nan_for_constants_and_leaves_out_missing_scores():
    a, b = column([3, NAN, 1, 2, 5, 4]), column([2, 9, 1, NAN, 4, 5])
    kept = [0, 2, 4, 5]
    for measure in (spearman, kendall):
        assert measure(a[kept], a[kept].exp()) == pytest.approx(1)
        assert math.isnan(measure(a[kept], torch.ones(4)))
        assert math.isnan(measure(a[:1], a[:1]))
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


# Distances of two sets of vectors


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


def test_the_distance_of_equal_sets_is_0_and_a_single_vector_raises() -> None:
    same = vectors(30, 5, 2)
    assert frechet_distance(same, same.flip(0)) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="at least two of each"):
        frechet_distance(same[:1], same)
    with pytest.raises(ValueError, match="1 and 3 vectors: the estimate needs at least two of each"):
        kernel_distance(torch.zeros(1, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("rows", [2, 1024])
def test_kernel_distance_equals_the_formula(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch_rewards.measures._ROWS", rows)
    random = torch.Generator().manual_seed(0)
    one, other = torch.randn(5, 4, generator=random), torch.randn(7, 4, generator=random) + 0.3

    def mean(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return sum((float((x.double() * y.double()).sum()) / 4 + 1) ** 3 for x, y in pairs) / len(pairs)

    within = [mean(list(itertools.permutations(each, 2))) for each in (one, other)]
    expected = sum(within) - 2 * mean(list(itertools.product(one, other)))
    assert kernel_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert kernel_distance(other, one) == pytest.approx(expected, rel=1e-9)
