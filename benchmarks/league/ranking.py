"""Statistics of the final runs: interquartile mean, probability of improvement, time to a share of the gap, with intervals.

The method is that of rliable (Agarwal et al. 2021, arXiv 2108.13264). Each seed has a score for each stratum of tasks, normalised
so that 0 is the base model and 1 the ceiling. The result is the mean of the middle half of these scores, with an interval from a
stratified bootstrap. Because there are few seeds, the bootstrap also draws the held-out tasks, the same ones for all contestants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from retouch.benchmarks.statistics import Interval, bootstrap_interval

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

    def shares(self, seeds: ndarray | None = None, tasks: Sequence[ndarray] | None = None) -> ndarray:
        """The share of the gap that was closed, (seeds, strata), for the given indices of seeds and tasks; by default for all."""
        columns = []
        for stratum, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            rows = slice(None) if seeds is None else seeds
            chosen = slice(None) if tasks is None else tasks[stratum]
            base = before[chosen].mean()
            columns.append((after[rows][:, chosen].mean(axis=1) - base) / (self.ceiling - base))
        return np.stack(columns, axis=1)


def interquartile_mean(scores: ndarray) -> float:
    """The mean without the lowest and the highest quarter of the scores; the number of scores in a quarter is rounded down."""
    flat = np.sort(scores, axis=None)
    cut = len(flat) // 4
    return float(flat[cut : len(flat) - cut].mean())


def probability_of_improvement(scores: ndarray, others: ndarray) -> float:
    """The probability that a run of ``scores`` (n, strata) beats a run of ``others`` (m, strata), averaged over the strata.

    A tie counts one half (Mann and Whitney 1947).
    """
    pairs = scores[:, None] - others[None]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


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
        found.append(measure([each.shares(drawn.integers(each.seeds, size=each.seeds), tasks) for each in contestants]))
    return [bootstrap_interval(np.array(estimates), clusters=sum(sizes)) for estimates in zip(*found, strict=True)]


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
    count = len(shares)
    pairs = np.full((count, count), 0.5)
    for k, j in combinations(range(count), 2):
        pairs[k, j] = probability_of_improvement(shares[k], shares[j])
        pairs[j, k] = 1 - pairs[k, j]
    return [float((row.sum() - 0.5) / (count - 1)) if count > 1 else 0.5 for row in pairs]
