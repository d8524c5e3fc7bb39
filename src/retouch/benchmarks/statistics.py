"""Confidence intervals of a suite's aggregates, by a bootstrap over clusters of items.

Items that share a source image are resampled together (Cameron, Gelbach and Miller 2008, the pairs cluster bootstrap). Intervals
are expanded percentile intervals (Hesterberg 2015, The American Statistician 69), because plain percentile intervals are too narrow
where there are few clusters: by sqrt((G - 1) / G), and because their quantiles are those of a normal, not a t distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from retouch.core.quantiles import t_quantile

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside."""
        return self.low > 0 or self.high < 0


def cluster_numbers(clusters: Sequence[str]) -> tuple[list[int], int]:
    """The number of each item's cluster, and how many clusters there are. An empty name is a cluster of its own."""
    numbers: dict[object, int] = {}
    members = [numbers.setdefault(name or index, len(numbers)) for index, name in enumerate(clusters)]
    return members, len(numbers)


def resample_counts(clusters: Sequence[str]) -> Float[ndarray, "b n"]:
    """How often each item is counted in each resample: whole clusters are drawn, with replacement, as many as there are."""
    members, count = cluster_numbers(clusters)
    return _counts(tuple(members), count)


@lru_cache(maxsize=4)  # the two sides of a comparison, and rows of a table, share them
def _counts(members: tuple[int, ...], count: int) -> Float[ndarray, "b n"]:
    drawn = np.random.default_rng([0, count]).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    counts: Float[ndarray, "b n"] = drawn[:, list(members)].astype(np.float64)
    counts.flags.writeable = False
    return counts


def bootstrap_interval(estimates: Float[ndarray, " b"], *, clusters: int) -> Interval | None:
    """The interval of an aggregate from its values over resamples, of ``clusters`` clusters that have a score.

    None for fewer than two clusters. Resamples in which nothing is counted (NaN) are left out.
    """
    known = estimates[~np.isnan(estimates)]
    if clusters < 2 or not len(known):
        return None
    tail = _expanded_tail(clusters)
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _expanded_tail(clusters: int) -> float:
    """The share of resamples outside each end, less than 2.5 %."""
    z = -math.sqrt(clusters / (clusters - 1)) * t_quantile(1 - (1 - LEVEL) / 2, clusters - 1)
    return NormalDist().cdf(z)
