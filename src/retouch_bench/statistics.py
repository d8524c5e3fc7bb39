"""Confidence intervals of a suite's aggregates, by a bootstrap over clusters of items.

Items that share a source image are resampled together (Cameron, Gelbach and Miller 2008, the pairs cluster bootstrap). Intervals
are expanded percentile intervals (Hesterberg 2015, The American Statistician 69), because plain percentile intervals are too narrow
for few clusters: by sqrt((G - 1) / G) for G clusters, and because they use normal quantiles instead of those of a t distribution.
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

from retouch.core.intervals import cluster_numbers, t_quantile

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low > 0 or self.high < 0


def resample_counts(clusters: Sequence[str]) -> Float[ndarray, "b n"]:
    """Return how often each resample counts each item. A resample draws as many clusters as there are, with replacement."""
    members, count = cluster_numbers(clusters)
    return _counts(tuple(members), count)


@lru_cache(maxsize=4)  # both sides of a comparison and several rows of a table use the same counts
def _counts(members: tuple[int, ...], count: int) -> Float[ndarray, "b n"]:
    drawn = np.random.default_rng([0, count]).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    counts: Float[ndarray, "b n"] = drawn[:, list(members)].astype(np.float64)
    counts.flags.writeable = False
    return counts


def bootstrap_interval(estimates: Float[ndarray, " b"], *, clusters: int) -> Interval | None:
    """Return the interval of an aggregate from its values in the resamples. ``clusters``: the number of clusters with a score.

    None for fewer than two clusters. Resamples without a scored item (NaN) are left out.
    """
    known = estimates[~np.isnan(estimates)]
    if clusters < 2 or not len(known):
        return None
    tail = _expanded_tail(clusters)
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _expanded_tail(clusters: int) -> float:
    """Return the share of resamples beyond each end of the interval, less than 2.5 %."""
    z = -math.sqrt(clusters / (clusters - 1)) * t_quantile(1 - (1 - LEVEL) / 2, clusters - 1)
    return NormalDist().cdf(z)
