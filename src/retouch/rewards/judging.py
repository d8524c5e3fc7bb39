"""From a reward's columns to the number that trains: policy faults, checks against the declared ranges, the combination.

Three outcomes for each sample: a value, the policy's own fault (the declared minimum), or missing (NaN).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.types import AsyncReward, Reward, Sample, Scores


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
    """A reward and how its columns combine: reward = sum of weight * column.

    ``combine`` names the columns that train and their weights; every other column is logged and decides nothing. ValueError where
    it names none, one that the reward does not have, or a diagnostic.
    """

    def __init__(self, reward: Reward, combine: Mapping[str, float]) -> None:
        if not combine:
            raise ValueError(f"combine names no column, so there is no reward; the judge gives {', '.join(reward.columns)}")
        for name in combine:
            if name not in reward.columns:
                raise ValueError(
                    f"combine names the column {name!r}, which the reward does not give; it gives {', '.join(reward.columns)}"
                )
            if reward.columns[name].diagnostic:
                raise ValueError(
                    f"combine names {name!r}, which is a diagnostic and may be missing by design; combine other columns"
                )
        self.reward = reward
        self.combine = dict(combine)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")

    def __call__(self, samples: Sequence[Sample]) -> Judged:
        """Judge now."""
        drawn = _drawn(samples)
        return self._judged(samples, self.reward(drawn) if drawn else {})

    def submit(self, samples: Sequence[Sample]) -> "Future[Judged]":
        """Judge while the caller goes on. Batches come back in the order in which they came here.

        A reward that can judge by itself (``AsyncReward``) gets each batch at once, however many are under way; any other one
        gets the next batch when it is done with the last.
        """
        drawn = _drawn(samples)
        if not (drawn and isinstance(self.reward, AsyncReward)):
            return self._pool.submit(self, samples)
        given = self.reward.submit(drawn)
        return self._pool.submit(lambda: self._judged(samples, given.result()))

    def combined(self, scores: Scores) -> Float[Tensor, " b"]:
        """The reward of each sample: NaN where any column that it is made of is."""
        return torch.stack([weight * scores[name] for name, weight in self.combine.items()]).sum(dim=0)

    def close(self) -> None:
        """End the judging thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _judged(self, samples: Sequence[Sample], given: Scores) -> Judged:
        """What was given for the samples with a picture; those without have every column's minimum."""
        drawn = torch.tensor([sample.image is not None for sample in samples], dtype=torch.bool)
        count = int(drawn.sum())
        scores: Scores = {}
        for name, column in self.reward.columns.items():
            scores[name] = torch.full((len(samples),), column.low, dtype=torch.float32)
            if count:
                scores[name][drawn] = self._checked(name, given, count)
        return Judged(scores, self.combined(scores), len(samples) - count)

    def _checked(self, name: str, given: Scores, count: int) -> Tensor:
        column = self.reward.columns[name]
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


def _drawn(samples: Sequence[Sample]) -> list[Sample]:
    """Those that a reward is shown."""
    return [sample for sample in samples if sample.image is not None]
