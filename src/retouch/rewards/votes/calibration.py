"""From a judge's score to the probability that people prefer the image: an isotonic map, fitted on votes.

Each vote gives two points: the score of either image, and 1, 0.5 or 0 for whether it won. The map is the isotonic regression of
these points (Ayer et al. 1955, Annals of Mathematical Statistics 26). Its uncertainty comes from a bootstrap over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.records import files

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

    from retouch.rewards.votes.log import Vote

RESAMPLES = 500
FEWEST_TASKS = 10
_MOST_KNOTS = 65


@dataclass(frozen=True, slots=True)
class Calibration:
    """The win probability at each of the ascending ``scores``; linear between them, constant outside.

    ``probability``, ``sd``: the map and its standard deviation over the resamples. ``low``, ``high``: its 95 % interval.
    """

    column: str
    scores: tuple[float, ...]
    probability: tuple[float, ...]
    sd: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    votes: int
    tasks: int

    def at(self, score: float) -> tuple[float, float]:
        """The win probability of a score, and its standard deviation; both NaN for NaN."""
        import numpy as np

        if math.isnan(score):
            return math.nan, math.nan
        return float(np.interp(score, self.scores, self.probability)), float(np.interp(score, self.scores, self.sd))

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "column": self.column,
            "votes": self.votes,
            "tasks": self.tasks,
            **{name: list(getattr(self, name)) for name in ("scores", "probability", "sd", "low", "high")},
        }

    def save(self, path: Path) -> None:
        """Write the map."""
        files.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """The inverse of ``save``. Raises ValueError for a missing file, and for one that is no monotone map."""
        if not path.is_file():
            raise ValueError(f"no file {path}; make it with: retouch votes RUN calibrate COLUMN --to {path}")
        found = files.read_json(path)
        try:
            curves = {name: tuple(map(float, found[name])) for name in ("scores", "probability", "sd", "low", "high")}
            made = cls(column=str(found["column"]), votes=int(found["votes"]), tasks=int(found["tasks"]), **curves)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path} is no calibration; make it with: retouch votes RUN calibrate COLUMN --to FILE") from None
        if (
            len({len(curve) for curve in curves.values()}) != 1
            or not made.scores
            or not all(math.isfinite(value) for curve in curves.values() for value in curve)
            or not all(0 <= value <= 1 for value in made.probability)
            or list(made.scores) != sorted(set(made.scores))
            or list(made.probability) != sorted(made.probability)
        ):
            raise ValueError(f"{path} is no monotone map from scores to probabilities; make it again with retouch votes")
        return made


def isotonic(scores: Sequence[float], values: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """The isotonic regression of the values on the scores: the distinct scores in order, and the value at each.

    Pool adjacent violators: neighbours out of order are replaced by their weighted mean until all are in order.
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
    """The map of a column, from all votes whose two images have its score.

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
    """At most 65 distinct scores, evenly spaced in rank."""
    distinct = sorted(set(scores))
    if len(distinct) <= _MOST_KNOTS:
        return distinct
    return sorted({distinct[round(k * (len(distinct) - 1) / (_MOST_KNOTS - 1))] for k in range(_MOST_KNOTS)})


def _map(scores: Sequence[float], won: Sequence[float], weights: Sequence[float], knots: Sequence[float]) -> Float[ndarray, " k"]:
    import numpy as np

    found, values = isotonic(scores, won, weights)
    return np.interp(knots, found, values)
