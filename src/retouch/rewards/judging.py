"""From a reward's columns to the number that trains: policy faults, checks against the declared ranges, the combination.

Three outcomes for each sample: a value, the policy's own fault (the declared minimum), or missing (NaN).
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.protocols import AsyncReward, Reward
from retouch.rewards.closing import close
from retouch.rewards.combine.combination import Combine, combination
from retouch.rewards.text.written import shown
from retouch.types import Column, Sample, Scores


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """``scores``: every column (b,). ``rewards``: the combined number (b,), NaN where the sample is missing.

    ``faults``: how many rows had no picture.
    """

    scores: Scores
    rewards: Float[Tensor, " b"]
    faults: int

    @classmethod
    def concat(cls, parts: "Sequence[Judged]") -> "Judged":
        """The rows of the parts, in order."""
        return cls(
            {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores},
            torch.cat([part.rewards for part in parts]),
            sum(part.faults for part in parts),
        )


class Judge:
    """A reward and how its columns combine, a weighted sum or a formula (``rewards/combine/combination.py::combination``).

    ``combine`` names the columns that train; every other one is logged and decides nothing. Samples without a picture are never
    shown to the reward: the policy's own fault is each column's worst (NaN for a diagnostic), and the combination's lowest.
    ValueError where ``combine`` does not go with the reward's columns.
    """

    def __init__(self, reward: Reward, combine: Combine) -> None:
        self.reward = reward
        self.combination = combination(combine, reward.columns)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")

    def __call__(self, samples: Sequence[Sample]) -> Judged:
        """Judge now."""
        return self.judged(samples, scores_of(self.reward, samples))

    def submit(self, samples: Sequence[Sample]) -> "Future[Judged]":
        """Judge while the caller goes on. Batches come back in the order in which they came here.

        A reward that can judge by itself (``AsyncReward``) gets each batch at once, however many are under way; any other one
        gets the next batch when it is done with the last.
        """
        drawn = _drawn(self.reward, samples)
        if not (drawn and isinstance(self.reward, AsyncReward)):
            return self._pool.submit(self, samples)
        given = self.reward.submit(drawn)
        return self._pool.submit(lambda: self.judged(samples, _columns(self.reward, samples, given.result())))

    def judged(self, samples: Sequence[Sample], scores: Scores) -> Judged:
        """These scores of these samples, combined: NaN where any column that the reward is made of is."""
        faults = torch.tensor([sample.image is None for sample in samples], dtype=torch.bool)
        rewards = self.combination(scores).masked_fill(faults, self.combination.low)
        return Judged(scores, rewards, int(faults.sum()))

    def close(self) -> None:
        """End the judging thread, and what the reward holds open."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        close(self.reward)


def scores_of(reward: Reward, samples: Sequence[Sample]) -> Scores:
    """Every column that the reward declares, (b,), float32: what it gave, or its worst where there is no picture to show.

    ValueError: a column that did not come, of another shape, or outside its declared range.
    """
    drawn = _drawn(reward, samples)
    return _columns(reward, samples, reward(drawn) if drawn else {})


def _drawn(reward: Reward, samples: Sequence[Sample]) -> list[Sample]:
    """What the reward is shown."""
    return shown([sample for sample in samples if sample.image is not None], reward)


def _columns(reward: Reward, samples: Sequence[Sample], given: Scores) -> Scores:
    drawn = torch.tensor([sample.image is not None for sample in samples], dtype=torch.bool)
    count = int(drawn.sum())
    scores: Scores = {}
    for name, column in reward.columns.items():
        fault = float("nan") if column.diagnostic else column.worst
        scores[name] = torch.full((len(samples),), fault, dtype=torch.float32)
        if count:
            scores[name][drawn] = _checked(name, column, given, count)
    return scores


def _checked(name: str, column: Column, given: Scores, count: int) -> Float[Tensor, " b"]:
    if name not in given:
        raise ValueError(
            f"the reward declares the column {name!r} and did not return it; it returned {', '.join(given) or 'nothing'}"
        )
    values = torch.as_tensor(given[name], dtype=torch.float32).cpu()
    if values.shape != (count,):
        raise ValueError(
            f"column {name!r} has shape {tuple(values.shape)} for {count} samples; return one a sample, NaN where missing"
        )
    outside = ~torch.isnan(values) & ~((values >= column.low) & (values <= column.high))
    if outside.any():
        wrong = values[outside][0].item()
        raise ValueError(
            f"column {name!r} gave {wrong}, outside its declared range {column.low} to {column.high}; declare the true range"
        )
    return values
