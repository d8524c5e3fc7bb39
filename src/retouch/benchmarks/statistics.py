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


def resample_counts(clusters: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0) -> Float[ndarray, "b n"]:
    """How often each item is counted in each resample: whole clusters are drawn, with replacement, as many as there are."""
    members, count = cluster_numbers(clusters)
    return _counts(tuple(members), count, resamples, seed)


@lru_cache(maxsize=4)  # the two sides of a comparison, and rows of a table, share them
def _counts(members: tuple[int, ...], count: int, resamples: int, seed: int) -> Float[ndarray, "b n"]:
    drawn = np.random.default_rng([seed, count]).multinomial(count, np.full(count, 1 / count), size=resamples)
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


def t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution with ``freedom`` degrees of freedom; exact for 1 and 2.

    Source: Abramowitz and Stegun 26.7.5, whose error is below 0.1 % for 0.975 from 3 degrees of freedom on.
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
