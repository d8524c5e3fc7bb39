"""Several rewards as one: each reward's columns stand under its name."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from retouch.protocols import Reward
from retouch.rewards.base import close, visible_samples
from retouch.rewards.combine.combination import Combine
from retouch.rewards.identity import describe
from retouch.rewards.scoring import call_reward
from retouch.types import Column, Sample, Scores, Task


class CompositeReward:
    """``rewards`` by name; the column ``alignment`` of the reward ``judge`` is ``judge/alignment``. ``combine``: what they are
    together where their scores are differentiated. ValueError: no rewards.

    A call runs all rewards at the same time, each on a thread. A ``RewardScorer`` runs them itself, so that batches overlap as
    well."""

    kind: Literal["several"] = "several"
    reads_completions: Literal[True] = True  # some may; each reward is given only what it may see

    def __init__(self, rewards: Mapping[str, Reward], *, combine: Combine | None = None) -> None:
        if not rewards:
            raise ValueError("several rewards, and none is named; name at least one")
        self.rewards = dict(rewards)
        self.combine: Combine = {} if combine is None else combine
        self.columns: Mapping[str, Column] = {
            f"{name}/{own}": column for name, reward in self.rewards.items() for own, column in reward.columns.items()
        }

    @property
    def fingerprint(self) -> str:
        """What each of the rewards judges by."""
        return json.dumps({name: describe(reward) for name, reward in self.rewards.items()}, sort_keys=True)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Every reward's columns under their full names, (b,) each. Raises the first reward's error once all have ended."""
        with ThreadPoolExecutor(max_workers=len(self.rewards), thread_name_prefix="reward") as threads:
            parts = {
                name: threads.submit(call_reward, reward, visible_samples(reward, samples), name)
                for name, reward in self.rewards.items()
            }
        return gathered(parts)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The weighted sum of the rewards' scores of images as tensors, with gradient."""
        from retouch.rewards.combine.gradients import weighted_scores

        return weighted_scores(self.rewards, self.combine, images, tasks)

    def close(self) -> None:
        """Close every reward."""
        for reward in self.rewards.values():
            close(reward)


def gathered(parts: "Mapping[str, Future[Scores]]") -> Scores:
    """The columns of the parts of a reward under their full names. Waits for all parts, then raises the first one's error."""
    for part in parts.values():
        part.exception()
    return {f"{name}/{own}" if name else own: column for name, part in parts.items() for own, column in part.result().items()}
