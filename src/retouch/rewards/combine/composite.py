"""Several rewards as one: each on a thread of its own, its columns under its name."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

from retouch.protocols import AsyncReward, Reward
from retouch.rewards import identity
from retouch.rewards.closing import close
from retouch.rewards.text.written import shown
from retouch.types import Column, Sample, Scores


class Several:
    """``rewards`` by name; the column ``alignment`` of the reward ``judge`` is ``judge/alignment``.

    All judge at the same time: those that can by themselves (``submit``), the others each on one thread, batch after batch in the
    order in which they came. What one raises, the whole raises, once all have ended. ValueError: no rewards.
    """

    reads_completions: Literal[True] = True  # some may; each is shown what it may see

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        if not rewards:
            raise ValueError("several rewards, and none is named; name at least one")
        self.rewards = dict(rewards)
        self.columns: Mapping[str, Column] = {
            f"{name}/{own}": column for name, reward in self.rewards.items() for own, column in reward.columns.items()
        }
        self._threads = {
            name: ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
            for name, reward in self.rewards.items()
            if not isinstance(reward, AsyncReward)
        }
        self._gathering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="several")

    @property
    def fingerprint(self) -> str:
        """What each of the rewards judges by."""
        return json.dumps({name: identity.describe(reward) for name, reward in self.rewards.items()}, sort_keys=True)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,)."""
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Judge while the caller goes on."""
        parts = {name: self._begin(name, reward, samples) for name, reward in self.rewards.items()}
        return self._gathering.submit(_gathered, parts)

    def close(self) -> None:
        """End the threads, and what the rewards hold open."""
        for thread in (*self._threads.values(), self._gathering):
            thread.shutdown(wait=True, cancel_futures=True)
        for reward in self.rewards.values():
            close(reward)

    def _begin(self, name: str, reward: Reward, samples: Sequence[Sample]) -> "Future[Scores]":
        seen = shown(samples, reward)
        return reward.submit(seen) if isinstance(reward, AsyncReward) else self._threads[name].submit(reward, seen)


def _gathered(parts: "Mapping[str, Future[Scores]]") -> Scores:
    """All parts' columns under their names, when the last has ended; the first one's error where any failed."""
    wait(parts.values())
    return {f"{name}/{own}": column for name, part in parts.items() for own, column in part.result().items()}
