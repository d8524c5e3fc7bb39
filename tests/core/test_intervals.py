"""Clustered intervals of means and shares: golden values that were computed by hand, and simulated data whose truth is known."""

import math

import numpy as np
import pytest

from retouch.core.intervals import MeanEstimate, estimate_mean, estimate_share


def test_a_mean_of_independent_values_has_the_usual_t_interval() -> None:
    """1, 2, 3, 6: mean 3, standard deviation sqrt(14 / 3); t(3) = 3.18245."""
    found = estimate_mean([1.0, 2.0, 3.0, math.nan, 6.0], [""] * 5)
    error = math.sqrt(14 / 3) / 2
    assert (found.mean, found.count, found.clusters) == (3.0, 4, 4)
    assert found.error == pytest.approx(error)
    assert found.interval == pytest.approx((3 - 3.18245 * error, 3 + 3.18245 * error), abs=1e-2)
    assert found.sigmas == pytest.approx(3 / error)
    assert estimate_mean([1.0, 2.0, 3.0, 6.0], list("abcd")) == found


def test_a_mean_of_one_cluster_has_no_interval_and_a_mean_of_no_values_is_nan() -> None:
    one = estimate_mean([1.0, 2.0], ["a", "a"])
    assert (one.mean, one.interval, one.sigmas) == (1.5, None, 0.0)
    none = estimate_mean([math.nan], ["a"])
    assert math.isnan(none.mean)
    assert math.isnan(none.sigmas)
    assert (none.interval, none.count, none.clusters) == (None, 0, 0)
    assert estimate_mean([0.5, 0.5], list("ab")).sigmas == math.inf
    assert estimate_mean([-0.5, -0.5], list("ab")).sigmas == -math.inf


@pytest.mark.parametrize("scale", [0.1, 0.4, -0.4, 2.0])
def test_the_number_of_clusters_for_significance_is_the_smallest_whose_interval_excludes_0(scale: float) -> None:
    found = estimate_mean([scale + value for value in (-1.0, -0.5, 0.5, 1.0)], [""] * 4)
    needed = found.clusters_for_significance

    def includes_0(clusters: int) -> bool:
        low, high = MeanEstimate(found.mean, found.error * math.sqrt(4 / clusters), clusters, clusters).interval
        return low <= 0 <= high

    assert needed is not None
    assert not includes_0(needed)
    assert needed == 2 or includes_0(needed - 1)
    assert includes_0(4) == (needed > 4)


def test_no_number_of_clusters_makes_a_mean_of_0_significant() -> None:
    assert estimate_mean([-1.0, 1.0], [""] * 2).clusters_for_significance is None
    assert estimate_mean([1.0, 1.0], ["a", "a"]).clusters_for_significance is None
    assert estimate_mean([1.0, 1.0], ["a", "b"]).clusters_for_significance == 2


@pytest.mark.parametrize("clusters", [3, 10, 40])
def test_intervals_of_clustered_means_have_95_percent_coverage(clusters: int) -> None:
    """Four tasks for each source, with two thirds of the variance between sources. Without clusters, intervals are too narrow."""
    random = np.random.default_rng(clusters)
    names = [str(number) for number in range(clusters) for _ in range(4)]
    runs, hits, naive = 4000, 0, 0
    for _ in range(runs):
        values = (np.repeat(random.normal(size=clusters), 4) * math.sqrt(2) + random.normal(size=4 * clusters)).tolist()
        low, high = estimate_mean(values, names).interval
        hits += low <= 0 <= high
        low, high = estimate_mean(values, [""] * len(values)).interval
        naive += low <= 0 <= high
    assert abs(hits / runs - 0.95) < 0.012
    assert naive / runs < 0.85


def test_interval_of_independent_values_matches_published_tables() -> None:
    """Wilson's interval of 7 of 10 (Newcombe 1998, method 3)."""
    found = estimate_share([1.0] * 7 + [0.0] * 3, list("abcdefghij"))
    assert (found.value, found.count, found.clusters) == (pytest.approx(0.7), 10, 10)
    assert (found.low, found.high) == (pytest.approx(0.3968, abs=1e-4), pytest.approx(0.8922, abs=1e-4))


def test_interval_of_unanimous_clusters_matches_hand_computation() -> None:
    """Two tasks with opposite votes: v = 2 x (1 + 1) / 16 = p (1 - p), so the effective size is 1; half = t / (2 sqrt(1 + t^2))."""
    found = estimate_share([1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"])
    t = 12.7062
    assert found.low == pytest.approx(0.5 - t / (2 * math.sqrt(1 + t * t)), abs=1e-5)
    assert found.high == pytest.approx(1 - found.low)


def test_interval_is_correct_for_unanimous_votes_one_cluster_and_no_votes() -> None:
    won = estimate_share([1.0] * 8, list("abcdabcd"))
    assert (won.value, won.high) == (1.0, 1.0)
    assert won.low == pytest.approx(1 / (1 + 3.18245**2 / 4), abs=1e-3)  # Wilson's for 4 of 4, t(3)
    one = estimate_share([1.0, 0.0], ["a", "a"])
    assert (one.value, one.low, one.high) == (0.5, 0.0, 1.0)
    assert math.isnan(estimate_share([], []).value)


@pytest.mark.parametrize(("tasks", "votes", "mean"), [(40, 3, 0.6), (15, 4, 0.5), (60, 2, 0.8)])
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
