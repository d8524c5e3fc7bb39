"""95 % confidence intervals of means and shares whose values come in clusters, such as tasks with the same source image.

Values of one cluster are not independent. The variance of a mean m is therefore computed from the clusters, for n values in G
clusters: v = G / (G - 1) Σ_clusters (Σ (y - m))² / n² (Cameron and Miller 2015, Journal of Human Resources 50; Miller 2024, arXiv
2411.00640, recommends it for evaluations). Intervals that people read are cluster bootstraps with 2000 resamples: their ends are
means of resamples, so a share stays between 0 and 1, and a score in its range. There is none for fewer than 8 clusters. Missing
values (NaN) are left out.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

FEWEST = 8  # an interval needs at least this many clusters
RESAMPLES = 2000
_TAIL = 0.975


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean with its standard error. ``count``: number of values. ``clusters``: number of clusters.

    ``mean`` is NaN without values. ``error`` is NaN for fewer than two clusters, because the variance is then unknown.
    ``parts``: the sum and the number of the values of each cluster.
    """

    mean: float
    error: float
    count: int
    clusters: int
    parts: tuple[tuple[float, int], ...] = ()

    @property
    def interval(self) -> "Interval | None":
        """The 95 % confidence interval, within the range of the values; None for fewer than 8 clusters."""
        if self.clusters < FEWEST:
            return None
        drawn, (sums, counts) = resamples(self.clusters), np.array(self.parts).T
        return bootstrap_interval(drawn @ sums / (drawn @ counts), clusters=self.clusters)

    @property
    def half_width(self) -> float:
        """Half of the width of Student's 95 % interval, mean ± t error; NaN for fewer than two clusters."""
        return t_quantile(_TAIL, self.clusters - 1) * self.error if self.clusters > 1 else math.nan

    @property
    def sigmas(self) -> float:
        """The mean in standard errors: 0 for a single cluster, infinite if all values are equal and not 0, NaN without values."""
        if self.clusters == 1 or self.mean == 0:
            return 0.0
        return self.mean / self.error if self.error != 0 else math.copysign(math.inf, self.mean)

    @property
    def clusters_for_significance(self) -> int | None:
        """The smallest number of clusters for which the 95 % interval would exclude 0, if the mean and the spread between clusters
        stayed the same; None for a mean of 0 and for fewer than two clusters."""
        if self.clusters < 2 or self.mean == 0:
            return None
        ratio = self.error * math.sqrt(self.clusters) / abs(self.mean)
        # Student's t has heavier tails than the normal distribution, so the normal quantile gives a lower bound.
        needed = max(2, math.ceil((NormalDist().inv_cdf(_TAIL) * ratio) ** 2))
        while t_quantile(_TAIL, needed - 1) * ratio >= math.sqrt(needed):
            needed += 1
        return needed


class Interval(NamedTuple):
    """The ends of a 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ShareInterval:
    """A share, 0 to 1, with its 95 % interval; NaN if there is no value. ``count``: number of values. ``clusters``: number of
    clusters."""

    value: float
    low: float
    high: float
    count: int
    clusters: int


def cluster_numbers(clusters: Sequence[str]) -> tuple[list[int], int]:
    """Return the cluster index of each value, and the number of clusters. A value with an empty name is a cluster by itself."""
    numbers: dict[object, int] = {}
    members = [numbers.setdefault(name or index, len(numbers)) for index, name in enumerate(clusters)]
    return members, len(numbers)


def estimate_mean(values: Sequence[float], clusters: Sequence[str] = ()) -> MeanEstimate:
    """The mean of the values that are not NaN, and its standard error, clustered by ``clusters``: the name of each value's cluster,
    "" for a value that is a cluster by itself; without names, all are."""
    values, clusters = _known(values, clusters)
    if not values:
        return MeanEstimate(math.nan, math.nan, 0, 0)
    mean, variance, groups = _clustered(values, clusters)
    members, _ = cluster_numbers(clusters)
    parts = zip(np.bincount(members, weights=values).tolist(), np.bincount(members).tolist(), strict=True)
    return MeanEstimate(mean, math.sqrt(variance), len(values), groups, tuple(parts))


@lru_cache(maxsize=4)  # the columns and several rows of a table use the same ones
def resamples(clusters: int) -> Float[ndarray, "b g"]:
    """Return how often each resample has each cluster. A resample draws as many clusters as there are, with replacement."""
    drawn = np.random.default_rng([0, clusters]).multinomial(clusters, np.full(clusters, 1 / clusters), size=RESAMPLES)
    counts: Float[ndarray, "b g"] = drawn.astype(np.float64)
    counts.flags.writeable = False
    return counts


def bootstrap_interval(estimates: Float[ndarray, " b"], *, clusters: int) -> Interval | None:
    """Return the 95 % interval of an aggregate from its values in the resamples (NaN: no item was scored), and None for fewer than
    8 clusters with a score. The tails are below 2.5 %, which corrects for few clusters as Student's t corrects 1.96."""
    known = estimates[~np.isnan(estimates)]
    if clusters < FEWEST or not len(known):
        return None
    tail = NormalDist().cdf(-math.sqrt(clusters / (clusters - 1)) * t_quantile(_TAIL, clusters - 1))
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(float(low), float(high))


def paired_change(before: Mapping[str, float], after: Mapping[str, float], sources: Mapping[str, str]) -> MeanEstimate:
    """Estimate the mean of after - before over the tasks that have both scores. ``sources``: the sources of tasks, by task id; a
    task without one has a source of its own."""
    both = [task for task in before if task in after]
    return estimate_mean([after[task] - before[task] for task in both], [sources.get(task, "") for task in both])


def estimate_share(values: Sequence[float], clusters: Sequence[str]) -> ShareInterval:
    """The mean of values between 0 and 1, with a confidence interval that is clustered by ``clusters``, as in ``estimate_mean``.

    Wilson's interval (1927), which stays inside 0 to 1. If values share clusters, it uses the effective sample size p (1 - p) / v,
    where v is the clustered variance of the mean (or the number of clusters if all values are 0 or all are 1), and a quantile of
    Student's t (Korn and Graubard 1998, Survey Methodology 24, use the same effective size). With one cluster the variance is
    unknown, and the interval is 0 to 1.
    """
    values, clusters = _known(values, clusters)
    if not values:
        return ShareInterval(math.nan, math.nan, math.nan, 0, 0)
    mean, variance, groups = _clustered(values, clusters)
    if groups < 2:
        return ShareInterval(mean, 0.0, 1.0, len(values), groups)
    binomial = mean * (1 - mean)
    size, z = float(groups), NormalDist().inv_cdf(_TAIL)
    if groups < len(values):
        size = binomial / variance if variance > 1e-12 and binomial > 1e-12 else size
        z = t_quantile(_TAIL, groups - 1)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(binomial / size + (z / (2 * size)) ** 2)
    return ShareInterval(mean, max(0.0, centre - half), min(1.0, centre + half), len(values), groups)


def t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution with ``freedom`` degrees of freedom at the probability ``share``, between 0 and 1.

    Exact for 1 and 2 degrees of freedom.

    Source: Abramowitz and Stegun 26.7.5. At probability 0.975 and 3 or more degrees of freedom, its error is below 0.1 %.
    """
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def _known(values: Sequence[float], clusters: Sequence[str]) -> tuple[list[float], list[str]]:
    rows = [row for row in zip(values, clusters or [""] * len(values), strict=True) if not math.isnan(row[0])]
    return [value for value, _ in rows], [cluster for _, cluster in rows]


def _clustered(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float, int]:
    """The mean, its variance (NaN for one cluster), and the number of clusters."""
    count, mean = len(values), math.fsum(values) / len(values)
    members, groups = cluster_numbers(clusters)
    sums: dict[int, float] = defaultdict(float)
    for value, member in zip(values, members, strict=True):
        sums[member] += value - mean
    if groups < 2:
        return mean, math.nan, groups
    return mean, groups / (groups - 1) * math.fsum(part * part for part in sums.values()) / count**2, groups
