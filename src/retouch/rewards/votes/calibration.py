"""An isotonic map from a judge's score to the probability that people prefer the image, fitted on votes.

Each vote gives one point for each of its two images: the image's score, and 1 (won), 0.5 (tie) or 0 (lost). The map is the isotonic
regression of these points (Ayer et al. 1955, Annals of Mathematical Statistics 26). Its uncertainty is computed by a bootstrap over
tasks.
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
    """The fitted map: the win probability at each of the ascending ``scores``, linear between them and constant outside.

    ``probability``, ``sd``: the win probability and its standard deviation over the bootstrap resamples. ``low``, ``high``: its
    95 % interval. ``votes``, ``tasks``: the number of votes and of tasks on which the map was fitted.
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
        """Return the win probability of a score, and its standard deviation; both are NaN if the score is NaN."""
        import numpy as np

        if math.isnan(score):
            return math.nan, math.nan
        return float(np.interp(score, self.scores, self.probability)), float(np.interp(score, self.scores, self.sd))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "column": self.column,
            "votes": self.votes,
            "tasks": self.tasks,
            **{name: list(getattr(self, name)) for name in ("scores", "probability", "sd", "low", "high")},
        }

    def save(self, path: Path) -> None:
        """Write the map to a JSON file."""
        files.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a map that ``save`` wrote. Raises ValueError if the file is missing, or does not contain a monotone map."""
        if not path.is_file():
            raise ValueError(f"no file {path}; create it with: retouch votes RUN calibrate COLUMN --to {path}")
        found = files.read_json(path)
        try:
            curves = {name: tuple(map(float, found[name])) for name in ("scores", "probability", "sd", "low", "high")}
            made = cls(column=str(found["column"]), votes=int(found["votes"]), tasks=int(found["tasks"]), **curves)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path} is not a calibration; create it with: retouch votes RUN calibrate COLUMN --to FILE") from None
        if (
            len({len(curve) for curve in curves.values()}) != 1
            or not made.scores
            or not all(math.isfinite(value) for curve in curves.values() for value in curve)
            or not all(0 <= value <= 1 for value in made.probability)
            or list(made.scores) != sorted(set(made.scores))
            or list(made.probability) != sorted(made.probability)
        ):
            raise ValueError(f"{path} is not a monotone map from scores to probabilities; create it again with retouch votes")
        return made


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
