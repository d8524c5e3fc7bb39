"""Statistics of the final runs: interquartile mean, probability of improvement, time to a share of the gap, with intervals.

The method is that of rliable (Agarwal et al. 2021, arXiv 2108.13264). Each seed has a score for each stratum of tasks, normalised
so that 0 is the base model and 1 the ceiling. The result is the mean of the middle half of these scores, with an interval from a
stratified bootstrap. Because there are few seeds, the bootstrap also draws the held-out tasks, the same ones for all contestants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from retouch.core.intervals import Interval, bootstrap_interval

RESAMPLES = 1000


@dataclass(frozen=True)
class Finals:
    """The final runs of a contestant. Per stratum of tasks, ``before`` has scores (tasks,) and ``after`` scores (seeds, tasks)."""

    name: str
    before: Sequence[ndarray]
    after: Sequence[ndarray]
    ceiling: float

    @classmethod
    def of(cls, name: str, runs: Sequence[Mapping[str, Any]]) -> "Finals":
        """Build it from the records of the finished runs, of which there is at least one."""
        ends = np.cumsum(runs[0]["tasks"])[:-1]
        after = np.split(np.array([run["after"] for run in runs]), ends, axis=1)
        return cls(name, np.split(np.array(runs[0]["before"]), ends), after, float(runs[0]["ceiling"]))

    @property
    def seeds(self) -> int:
        """The number of runs."""
        return len(self.after[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of tasks in each stratum."""
        return tuple(len(tasks) for tasks in self.before)

    def shares(self) -> ndarray:
        """The share of the gap that was closed, (seeds, strata)."""
        (found,) = shares_of([self], [np.arange(size) for size in self.sizes])
        return found


def shares_of(contestants: Sequence[Finals], tasks: Sequence[ndarray]) -> list[ndarray]:
    """The share of the gap that each contestant closed on tasks, given by their indices in each stratum, (seeds, strata) each."""
    seeds = [each.seeds for each in contestants]
    ceiling = np.repeat([each.ceiling for each in contestants], seeds)
    columns = []
    for stratum, chosen in enumerate(tasks):
        base = np.repeat(np.array([each.before[stratum] for each in contestants])[:, chosen].mean(axis=1), seeds)
        after = np.concatenate([each.after[stratum] for each in contestants])[:, chosen].mean(axis=1)
        columns.append((after - base) / (ceiling - base))
    return np.split(np.stack(columns, axis=1), np.cumsum(seeds)[:-1])


def mean_interval(contestant: Finals) -> Interval | None:
    """The interval of the mean over seeds of the share of the gap, of the tasks of all strata together (what the curves show).

    As in ``resampled``, a resample draws the tasks of each stratum, and the seeds.
    """
    drawn = np.random.default_rng(0)
    tasks = [drawn.integers(size, size=(RESAMPLES, size)) for size in contestant.sizes]
    seeds = drawn.integers(contestant.seeds, size=(RESAMPLES, contestant.seeds))
    before = np.concatenate([scores[chosen] for scores, chosen in zip(contestant.before, tasks, strict=True)], axis=1).mean(axis=1)
    after = np.concatenate([scores[:, chosen] for scores, chosen in zip(contestant.after, tasks, strict=True)], axis=2).mean(axis=2)
    mean = np.take_along_axis(after.T, seeds, axis=1).mean(axis=1)
    estimates = (mean - before) / (contestant.ceiling - before)
    return bootstrap_interval(estimates.round(9), clusters=sum(contestant.sizes))


def interquartile_mean(scores: ndarray) -> float:
    """The mean without the lowest and the highest quarter of the scores; the number of scores in a quarter is rounded down."""
    flat = np.sort(scores, axis=None)
    cut = len(flat) // 4
    return float(flat[cut : len(flat) - cut].mean())


def probability_of_improvement(scores: ndarray, others: ndarray) -> float:
    """The probability that a run of ``scores`` (n, strata) beats a run of ``others`` (m, strata), averaged over the strata.

    A tie counts one half (Mann and Whitney 1947).
    """
    return float(_wins(scores, others).mean())


def _wins(scores: ndarray, others: ndarray) -> ndarray:
    """1 where a run of ``scores`` (n, strata) beats a run of ``others`` (m, strata), 0.5 for a tie, else 0: (n, m, strata)."""
    pairs = scores[:, None] - others[None]
    return (pairs > 0) + 0.5 * (pairs == 0)


def time_to(curve: Sequence[Sequence[float]], share: float, *, ceiling: float) -> float | None:
    """The x at which a curve of points (x, score) first reaches a share of the gap, interpolated linearly; None if never."""
    goal = curve[0][1] + share * (ceiling - curve[0][1])
    for (x, low), (end, high) in pairwise(curve):
        if high >= goal > low:
            return x + (goal - low) / (high - low) * (end - x)
    return None


def resampled(contestants: Sequence[Finals], measure: Callable[[Sequence[ndarray]], Sequence[float]]) -> list[Interval | None]:
    """The interval of each number that ``measure`` computes. ``measure`` gets the shares (seeds, strata) of each contestant.

    Every resample draws the tasks of each stratum, the same ones for all contestants, and the seeds of each contestant separately.
    """
    drawn = np.random.default_rng(0)
    sizes = contestants[0].sizes
    assert all(each.sizes == sizes for each in contestants), "all are scored on the same tasks"
    found = []
    for _ in range(RESAMPLES):
        tasks = [drawn.integers(size, size=size) for size in sizes]
        shares = shares_of(contestants, tasks)
        found.append(measure([each[drawn.integers(len(each), size=len(each))] for each in shares]))
    # Rounded, so that a score between two printed digits is the same on every CPU.
    return [bootstrap_interval(estimates, clusters=sum(sizes)) for estimates in np.array(found).T.round(9)]


@dataclass(frozen=True)
class Rank:
    """A row of the table. ``better``: the mean over the other contestants of the probability that a run beats one of theirs."""

    name: str
    score: float
    interval: Interval | None
    better: float
    better_interval: Interval | None


def ranking(contestants: Sequence[Finals]) -> list[Rank]:
    """The contestants, best first."""

    def measure(shares: Sequence[ndarray]) -> list[float]:
        return [*(interquartile_mean(each) for each in shares), *_improvements(shares)]

    found = measure([each.shares() for each in contestants])
    intervals = resampled(contestants, measure)
    count = len(contestants)
    rows = [Rank(each.name, found[k], intervals[k], found[count + k], intervals[count + k]) for k, each in enumerate(contestants)]
    return sorted(rows, key=lambda row: -row.score)


def _improvements(shares: Sequence[ndarray]) -> list[float]:
    """The mean probability of improvement of each contestant over the other contestants; 0.5 if there is only one."""
    seeds = [len(each) for each in shares]
    starts = np.cumsum([0, *seeds[:-1]])
    runs = np.concatenate(shares)
    wins = _wins(runs, runs).mean(axis=2)
    pairs = np.add.reduceat(np.add.reduceat(wins, starts, axis=0), starts, axis=1) / np.outer(seeds, seeds)
    count = len(shares)
    return [float((row.sum() - 0.5) / (count - 1)) if count > 1 else 0.5 for row in pairs]
