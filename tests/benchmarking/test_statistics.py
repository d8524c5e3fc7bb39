"""Intervals of suites: they contain the true mean as often as their level states, and items of a cluster are resampled together."""

import numpy as np
import pytest

from retouch.core.intervals import bootstrap_interval, cluster_numbers, t_quantile
from retouch_bench.results import resample_counts

BENCHMARKS = 1000


def simulated(clusters, members, *, within, seed):
    """Scores (benchmarks, n) from 0 to 10 with mean 0, clustered: a share ``1 - within`` of their variance is the cluster's."""
    draw = np.random.default_rng(seed)
    shared = draw.standard_normal((BENCHMARKS, clusters, 1)) * np.sqrt(1 - within)
    own = draw.exponential(1.0, (BENCHMARKS, clusters, members)) - 1
    return (shared + own * np.sqrt(within)).reshape(BENCHMARKS, -1)


@pytest.mark.parametrize(("clusters", "members", "within"), [(150, 1, 1.0), (40, 1, 1.0), (60, 4, 0.4), (25, 5, 0.6)])
def test_intervals_contain_the_true_mean_in_93_to_97_percent_of_1000_benchmarks(clusters, members, within):
    scores = simulated(clusters, members, within=within, seed=clusters)
    names = [str(item // members) for item in range(clusters * members)]
    counts = resample_counts(names)
    means = scores @ (counts / counts.sum(1, keepdims=True)).T
    found = [bootstrap_interval(row, clusters=clusters) for row in means]
    covered = np.mean([each is not None and each[0] <= 0 <= each[1] for each in found])
    assert 0.93 <= covered <= 0.97


def test_intervals_of_clustered_items_are_too_narrow_if_clusters_are_ignored():
    scores = simulated(60, 4, within=0.4, seed=1)
    counts = resample_counts([""] * 240)
    found = [bootstrap_interval(row, clusters=240) for row in scores @ (counts / 240).T]
    assert np.mean([each is not None and each[0] <= 0 <= each[1] for each in found]) < 0.85


def test_items_of_a_cluster_are_resampled_together_and_other_items_separately():
    counts = resample_counts(["a", "", "a", "b", ""])
    assert cluster_numbers(["a", "", "a", "b", ""]) == ([0, 1, 0, 2, 3], 4)
    assert (counts[:, 0] == counts[:, 2]).all()
    assert not (counts[:, 1] == counts[:, 4]).all()
    assert (counts[:, [0, 1, 3, 4]].sum(1) == 4).all()
    assert np.array_equal(counts, resample_counts(["x", "", "x", "y", ""]))


TABLE = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 40: 2.02108, 1000: 1.96234}


@pytest.mark.parametrize(("freedom", "published"), TABLE.items())
def test_t_quantiles_match_published_tables(freedom, published):
    assert t_quantile(0.975, freedom) == pytest.approx(published, rel=2e-3)


def test_few_clusters_or_nan_scores_give_no_interval():
    assert bootstrap_interval(np.array([1.0, 1.0]), clusters=7) is None
    assert bootstrap_interval(np.array([np.nan]), clusters=9) is None
