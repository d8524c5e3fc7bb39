"""Strengths of arms or images from pairwise votes (Bradley and Terry 1952, Biometrika 39): P(i beats j) = sigmoid(s_i - s_j).

A tie counts as half a win for each side. A Gaussian prior keeps the strengths finite if one side won every vote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retouch.core.intervals import t_quantile

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

    from retouch_view.votes.log import Vote

TABLE_PRIOR = 0.05
"""Precision of the prior in a table of arms: negligible in comparison with a hundred votes."""


def strengths(points: Sequence[tuple[int, int, float]], *, count: int, prior: float) -> Float[ndarray, " count"]:
    """Return the maximum a posteriori strengths of ``count`` sides, in log-odds; their mean is 0.

    ``points``: for each vote the index of the first side, the index of the second side, and the points of the first side, 0 to 1.
    ``prior``: the precision (1 / variance) of the Gaussian prior of each strength, above 0.
    """
    return _fit(points, count, prior)[0]


def _fit(points: Sequence[tuple[int, int, float]], count: int, prior: float) -> tuple[Float[ndarray, " count"], ndarray, ndarray]:
    """Return the strengths, the inverse Hessian of the negative log posterior, and the gradient of each vote (n, count)."""
    import numpy as np

    design = np.zeros((len(points), count))
    rows = np.arange(len(points))
    design[rows, [first for first, _, _ in points]] += 1
    design[rows, [second for _, second, _ in points]] -= 1
    won = np.array([value for _, _, value in points], dtype=np.float64)
    found = np.zeros(count)
    for _ in range(100):
        expected = 1 / (1 + np.exp(-(design @ found)))
        gradient = design.T @ (won - expected) - prior * found
        hessian = design.T @ (design * (expected * (1 - expected))[:, None]) + prior * np.eye(count)
        step = np.linalg.solve(hessian, gradient)
        found = found + step * min(1.0, 2.0 / max(float(np.abs(step).max(initial=0.0)), 1e-12))
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    expected = 1 / (1 + np.exp(-(design @ found)))
    hessian = design.T @ (design * (expected * (1 - expected))[:, None]) + prior * np.eye(count)
    return found, np.linalg.inv(hessian), design * (won - expected)[:, None]


def preferences(points: Sequence[tuple[int, int, float]], *, count: int, prior: float) -> list[float]:
    """Return for each side its win probability, 0 to 1, averaged over all other sides; NaN for a side without a vote.

    The average includes sides without a vote, because the prior gives their strength. ``prior``: as in ``strengths``.
    """
    found = strengths(points, count=count, prior=prior).tolist()
    compared = {side for first, second, _ in points for side in (first, second)}
    return [
        math.fsum(1 / (1 + math.exp(other - own)) for index, other in enumerate(found) if index != side) / (count - 1)
        if side in compared and count > 1
        else math.nan
        for side, own in enumerate(found)
    ]


@dataclass(frozen=True, slots=True)
class ArmStrength:
    """A row of the table: an arm, its number of votes, its strength in log-odds (the mean over all arms is 0) with a 95 % interval,
    and the probability that it wins against an arm of strength 0."""

    arm: str
    votes: int
    strength: float
    low: float
    high: float
    wins_against_mean: float


def table(votes: Iterable[Vote]) -> list[ArmStrength]:
    """Return the arms of the votes, the strongest first; empty if fewer than two arms were compared.

    Intervals are t intervals. The variance is the cluster-robust (sandwich) variance, clustered by task, or the variance of the
    model if it is larger, for example if one arm has won every vote. With a single task, the intervals are infinite.
    """
    import numpy as np

    used = [vote for vote in votes if vote.left.arm and vote.right.arm and vote.left.arm != vote.right.arm]
    arms = sorted({side.arm for vote in used for side in (vote.left, vote.right)})
    if len(arms) < 2:
        return []
    number = {arm: index for index, arm in enumerate(arms)}
    points = [(number[vote.left.arm], number[vote.right.arm], vote.left_points) for vote in used]
    found, inverse, gradients = _fit(points, len(arms), TABLE_PRIOR)
    tasks = sorted({vote.task for vote in used})
    at = {task: index for index, task in enumerate(tasks)}
    sums = np.zeros((len(tasks), len(arms)))
    np.add.at(sums, [at[vote.task] for vote in used], gradients)
    groups = len(tasks)
    if groups > 1:
        centre = np.eye(len(arms)) - 1 / len(arms)
        robust = inverse @ (groups / (groups - 1) * sums.T @ sums) @ inverse
        model = centre @ inverse @ centre
        half = t_quantile(0.975, groups - 1) * np.sqrt(np.maximum(np.diag(robust), np.diag(model)))
    else:
        half = np.full(len(arms), math.inf)
    counts = [sum(index in pair for pair in ((first, second) for first, second, _ in points)) for index in range(len(arms))]
    rows = [
        ArmStrength(
            arm,
            counts[k],
            float(found[k]),
            float(found[k] - half[k]),
            float(found[k] + half[k]),
            1 / (1 + math.exp(-float(found[k]))),
        )
        for k, arm in enumerate(arms)
    ]
    return sorted(rows, key=lambda row: -row.strength)
