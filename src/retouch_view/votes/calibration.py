"""An isotonic map from a judge's score to the probability that people prefer the image, fitted on votes.

Each vote gives one point for each of its two images: the image's score, and 1 (won), 0.5 (tie) or 0 (lost). The map is the isotonic
regression of these points (Ayer et al. 1955, Annals of Mathematical Statistics 26). Its uncertainty is computed by a bootstrap over
tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from retouch.rewards.combine.calibrated import Calibration

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

    from retouch_view.votes.log import Vote

RESAMPLES = 500
FEWEST_TASKS = 10
_MOST_KNOTS = 65


def isotonic(scores: Sequence[float], values: Sequence[float], weights: Iterable[float]) -> tuple[list[float], list[float]]:
    """Fit the isotonic regression of the values on the scores. Returns the distinct scores in order, and the value at each score.

    The algorithm is pool adjacent violators: neighbouring values in the wrong order are replaced by their weighted mean until all
    values are in order. Points with weight 0 are ignored.
    """
    sums: dict[float, list[float]] = {}
    for score, value, weight in zip(scores, values, weights, strict=True):
        if weight > 0:
            place = sums.setdefault(score, [0.0, 0.0])
            place[0] += weight * value
            place[1] += weight
    ordered = sorted(sums)
    blocks: list[list[float]] = []  # mean, weight, number of scores
    for score in ordered:
        total, weight = sums[score]
        blocks.append([total / weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight, size = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += size
    return ordered, [mean for mean, _, size in blocks for _ in range(int(size))]


def calibrate(votes: Iterable[Vote], column: str, *, resamples: int = RESAMPLES, seed: int = 0) -> Calibration:
    """Fit the map of a column on all votes whose two images both have a score in this column.

    Raises ValueError if these votes are on fewer than 10 tasks.
    """
    import numpy as np

    used = [vote for vote in votes if column in vote.left.scores and column in vote.right.scores]
    tasks = sorted({vote.task for vote in used})
    if len(tasks) < FEWEST_TASKS:
        raise ValueError(
            f"{len(tasks)} tasks have votes on images with a score {column!r}; a calibration needs at least {FEWEST_TASKS}"
        )
    number = {task: index for index, task in enumerate(tasks)}
    scores = [side.scores[column] for vote in used for side in (vote.left, vote.right)]
    won = [points for vote in used for points in (vote.left_points, 1 - vote.left_points)]
    members = np.array([number[vote.task] for vote in used for _ in range(2)])
    knots = _knots(scores)
    fitted = _map(scores, won, np.ones(len(scores)), knots)
    drawn = np.random.default_rng([seed, len(tasks)]).multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=resamples)
    curves = np.stack([_map(scores, won, counts[members], knots) for counts in drawn])
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    return Calibration(
        column,
        tuple(knots),
        tuple(fitted.tolist()),
        tuple(curves.std(axis=0, ddof=1).tolist()),
        tuple(low.tolist()),
        tuple(high.tolist()),
        len(used),
        len(tasks),
    )


def _knots(scores: Sequence[float]) -> list[float]:
    """Select at most 65 distinct scores, evenly spaced in rank."""
    distinct = sorted(set(scores))
    if len(distinct) <= _MOST_KNOTS:
        return distinct
    return sorted({distinct[round(k * (len(distinct) - 1) / (_MOST_KNOTS - 1))] for k in range(_MOST_KNOTS)})


def _map(scores: Sequence[float], won: Sequence[float], weights: Iterable[float], knots: Sequence[float]) -> Float[ndarray, " k"]:
    import numpy as np

    found, values = isotonic(scores, won, weights)
    return np.interp(knots, found, values)
