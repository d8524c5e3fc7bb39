"""The statistics of an audit: means and intervals over items, and the measures of a ladder.

Scores are shares of the judge's range, 0 to 1. Items are independent of each other; the scores of one item are not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from retouch.core.agreement import kendall
from retouch.core.intervals import t_quantile
from retouch_bench.judges.asking import JudgeAnswer, ProbeScores

SHOWN = 0.95
"""The level of the intervals that the report shows."""
SURE = 0.995
"""The level of the intervals that decide the status, so that ten lines raise a false alarm in at most one of twenty audits."""
_RESAMPLES = 500

ScoreOf: TypeAlias = Callable[[ProbeScores], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over ``count`` items and its standard error, which is NaN for fewer than two items."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean from one value per item; missing values (NaN) are left out."""
        known = np.array([value for value in values if not math.isnan(value)])
        if len(known) < 2:
            return cls(float(known[0]) if len(known) else math.nan, math.nan, len(known))
        return cls(float(known.mean()), float(known.std(ddof=1) / math.sqrt(len(known))), len(known))

    def interval(self, level: float) -> tuple[float, float]:
        """Return Student's t interval of the mean."""
        if math.isnan(self.error):
            return math.nan, math.nan
        half = t_quantile(0.5 + level / 2, self.count - 1) * self.error
        return self.mean - half, self.mean + half

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in other units, multiplied by ``factor``."""
        return Estimate(self.mean * factor, self.error * abs(factor), self.count)


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not missing (NaN); NaN if all are missing."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def difference(scored: Sequence[ProbeScores], first: ScoreOf, second: ScoreOf) -> Estimate:
    """Estimate the mean of first - second over the items."""
    return Estimate.of([first(one) - second(one) for one in scored])


def score_of(name: str) -> ScoreOf:
    """Return a function that gives the mean score of the probe with this name; NaN for items without the probe."""
    return lambda one: mean(one.scores.get(name, ()))


def noise_variance(scored: Sequence[ProbeScores]) -> Estimate:
    """Estimate the variance of repeated scores of the same image; the value of an item is the mean over its rungs."""
    return Estimate.of([mean([_variance(one.scores[rung.name]) for rung in one.item.rungs]) for one in scored])


def signal_variance(scored: Sequence[ProbeScores]) -> Estimate:
    """Estimate the variance between the rungs of an item without noise: the covariance of their scores in different repeats."""
    return Estimate.of([_covariance([one.scores[rung.name] for rung in one.item.rungs]) for one in scored])


def _variance(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.var(known, ddof=1)) if len(known) > 1 else math.nan


def _covariance(rows: Sequence[Sequence[float]]) -> float:
    """Return the mean covariance of two columns, over the rows without a missing value."""
    whole = np.array([row for row in rows if not any(math.isnan(value) for value in row)])
    if len(whole) < 2:
        return math.nan
    covariances = np.atleast_2d(np.cov(whole, rowvar=False))
    columns = len(covariances)
    return float((covariances.sum() - np.trace(covariances)) / (columns * (columns - 1)))


@dataclass(frozen=True, slots=True, eq=False)
class RankAgreement:
    """How the order of the scores agrees with the truth, as means over items.

    ``right``: share of pairs in the right order (ties count half). ``tau``: Kendall's tau-b. ``wrong``: share of pairs in the wrong
    order by more than noise explains (2.33 standard errors).
    """

    right: Estimate
    tau: Estimate
    wrong: Estimate

    @classmethod
    def of(cls, scored: Sequence[ProbeScores], *, noise: float) -> "RankAgreement":
        """Estimate the agreement. ``noise``: the variance of repeated scores."""
        rows = [_order(one, noise) for one in scored]
        right, tau, wrong = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(Estimate.of(right), Estimate.of(tau), Estimate.of(wrong))


def _order(one: ProbeScores, noise: float) -> tuple[float, float, float]:
    known = [
        (rung.truth, mean(one.scores[rung.name]), sum(not math.isnan(value) for value in one.scores[rung.name]))
        for rung in one.item.rungs
        if rung.truth is not None
    ]
    known = [rung for rung in known if rung[2]]
    right = wrong = pairs = 0.0
    for place, (truth, score, repeats) in enumerate(known):
        for other_truth, other_score, other_repeats in known[place + 1 :]:
            if truth == other_truth:
                continue
            rise = (score - other_score) * (1 if truth > other_truth else -1)
            pairs += 1
            right += 0.5 if rise == 0 else float(rise > 0)
            wrong += float(rise < -2.33 * math.sqrt(noise * (1 / repeats + 1 / other_repeats)) - 1e-9)
    truths, scores, _ = torch.tensor(known, dtype=torch.float64).reshape(-1, 3).T
    tau = kendall(truths, scores)
    return (right / pairs, tau, wrong / pairs) if pairs else (math.nan, math.nan, math.nan)


def share_interval(count: int, of: int, level: float) -> tuple[float, float]:
    """Return Wilson's interval of the share ``count / of``."""
    if of == 0:
        return math.nan, math.nan
    z = NormalDist().inv_cdf(0.5 + level / 2)
    centre, spread = count + z * z / 2, z * math.sqrt(count * (of - count) / of + z * z / 4)
    return max(0.0, (centre - spread) / (of + z * z)), min(1.0, (centre + spread) / (of + z * z))


def useful_bits(scored: Sequence[ProbeScores]) -> tuple[float, tuple[float, float]]:
    """Return the information in one score about the truth, in bits, and its 95 % interval (bootstrap over items).

    It is -log2(1 - r^2) / 2 with the correlation r of scores and truths, as for a Gaussian channel; at most log2 of the number of
    different truths.
    """
    parts = [_truths_and_scores(one) for one in scored]
    most = math.log2(len({truth for part in parts for truth in part[:, 0]}) or 1)
    draw = np.random.default_rng(0)
    drawn = [_bits([parts[k] for k in draw.integers(len(parts), size=len(parts))], most) for _ in range(_RESAMPLES if parts else 0)]
    known = [value for value in drawn if not math.isnan(value)]
    low, high = np.quantile(known, [0.025, 0.975]) if known else (math.nan, math.nan)
    return _bits(parts, most), (float(low), float(high))


def _truths_and_scores(one: ProbeScores) -> Float[ndarray, "n 2"]:
    rows = [(rung.truth, score) for rung in one.item.rungs for score in one.scores[rung.name] if not math.isnan(score)]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _bits(parts: Sequence[Float[ndarray, "n 2"]], most: float) -> float:
    rows = np.concatenate(parts) if parts else np.zeros((0, 2))
    if len(rows) < 3:
        return math.nan
    truth, score = (rows - rows.mean(axis=0)).T
    scale = float((truth**2).sum() * (score**2).sum())
    square = float((truth @ score) ** 2) / scale if scale > 1e-18 else 0.0
    return most if square >= 1 - 4.0**-most else abs(math.log2(1 - square)) / 2


def length_correlation(answers: Sequence[JudgeAnswer]) -> tuple[float, int]:
    """Return the correlation of length and score among answers to the same question, and its degrees of freedom: the number of
    answers minus the number of questions. The correlation is NaN if lengths or scores never differ."""
    groups: dict[int, list[JudgeAnswer]] = {}
    for answer in answers:
        groups.setdefault(answer.question, []).append(answer)
    rows = [row for group in groups.values() if len(group) > 1 for row in _centred(group)]
    freedom = len(rows) - sum(len(group) > 1 for group in groups.values())
    lengths, scores = np.array(rows).reshape(-1, 2).T
    scale = float((lengths**2).sum() * (scores**2).sum())
    return (float(lengths @ scores) / math.sqrt(scale) if scale > 1e-12 else math.nan), freedom


def correlation_interval(correlation: float, freedom: int, level: float) -> tuple[float, float]:
    """Return Fisher's interval of a correlation with ``freedom`` degrees of freedom."""
    inside = min(max(correlation, -0.999999), 0.999999)
    half = NormalDist().inv_cdf(0.5 + level / 2) / math.sqrt(max(freedom - 2, 1))
    return math.tanh(math.atanh(inside) - half), math.tanh(math.atanh(inside) + half)


def _centred(group: Sequence[JudgeAnswer]) -> list[tuple[float, float]]:
    length, score = (mean([float(value) for value in values]) for values in zip(*((a.length, a.score) for a in group), strict=True))
    return [(answer.length - length, answer.score - score) for answer in group]


def repeats_for(variance: float, precision: float) -> int:
    """Return how many scores must be averaged so that 95 % of the means are within ``precision`` of the true mean."""
    return max(1, math.ceil(1.96**2 * max(variance, 0.0) / precision**2 - 1e-9))
