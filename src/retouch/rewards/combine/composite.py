"""Several rewards as one reward: the name of each reward is the prefix of its columns."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from retouch.config.imports import user_code_error
from retouch.protocols import Reward
from retouch.rewards.base import close, compares_groups
from retouch.rewards.combine.combination import Combine
from retouch.rewards.identity import describe
from retouch.rewards.scoring import call_reward
from retouch.types import Column, Sample, Scores, Task


class CompositeReward:
    """Several rewards as one. The column ``alignment`` of the reward ``judge`` is named ``judge/alignment``.

    ``rewards``: by name. ``combine``: the combination that is used when the scores are differentiated. Raises ValueError if there
    are no rewards.

    A call runs all rewards at the same time, each on its own thread. A ``RewardScorer`` calls the rewards itself, so that batches
    overlap as well.
    """

    kind: Literal["several"] = "several"
    reads_completions: Literal[True] = True  # each reward receives only what it may see

    def __init__(self, rewards: Mapping[str, Reward], *, combine: Combine | None = None) -> None:
        if not rewards:
            raise ValueError("rewards is empty; name at least one reward")
        self.rewards = dict(rewards)
        self.combine: Combine = {} if combine is None else combine
        self.columns: Mapping[str, Column] = {
            f"{name}/{own}": column for name, reward in self.rewards.items() for own, column in reward.columns.items()
        }
        self.compares_groups = any(compares_groups(reward) for reward in self.rewards.values())

    @property
    def fingerprint(self) -> str:
        """The descriptions of the rewards by name, as JSON (``retouch.rewards.identity.describe``)."""
        return json.dumps({name: describe(reward) for name, reward in self.rewards.items()}, sort_keys=True)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The columns of all rewards by full name, (b,) each. If rewards fail, raises the first error after all rewards have
        ended."""
        with ThreadPoolExecutor(max_workers=len(self.rewards), thread_name_prefix="reward") as threads:
            parts = {name: threads.submit(call_reward, reward, samples, name) for name, reward in self.rewards.items()}
        return collect_scores(parts)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The weighted sum of the rewards' scores of ``images``, values 0 to 1, with gradient in the images."""
        from retouch.rewards.combine.gradients import weighted_scores

        return weighted_scores(self.rewards, self.combine, images, tasks)

    def close(self) -> None:
        """Close every reward."""
        for reward in self.rewards.values():
            close(reward)


def collect_scores(parts: "Mapping[str, Future[Scores]]") -> Scores:
    """The columns of all parts of a reward by full name. Waits for all parts, then raises the first error, if there is one."""
    failed = {name: part.exception() for name, part in parts.items()}
    for name, error in failed.items():
        if error is not None and not isinstance(error, Exception):  # sys.exit in a reward that answers later
            raise user_code_error(error, f"reward {name}" if name else "the reward") or error
    return {f"{name}/{own}" if name else own: column for name, part in parts.items() for own, column in part.result().items()}
