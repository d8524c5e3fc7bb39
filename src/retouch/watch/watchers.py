"""What looks at pictures beside the reward: the held-out judge, and measures that no judge has to give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from retouch.assembly.reward import build_reward
from retouch.protocols import Reward
from retouch.recipe.watch import Watch
from retouch.rewards.judging import Judge
from retouch.rewards.scorers.appearance import AppearanceReward
from retouch.rewards.text.painted_text import PaintedTextReward
from retouch.types import Sample, Scores


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """``heldout``: never trained on; None where there is none."""

    heldout: Judge | None
    measures: Sequence[Reward]

    def measured(self, samples: Sequence[Sample]) -> Scores:
        """Every measure's columns, each (b,); NaN for a sample without a picture."""
        scores: Scores = {}
        drawn = [row for row, sample in enumerate(samples) if sample.image is not None]
        for reward in self.measures:
            given = reward([samples[row] for row in drawn])
            for name in reward.columns:
                scores[name] = torch.full((len(samples),), torch.nan)
                scores[name][drawn] = given[name]
        return scores

    def close(self) -> None:
        """End the held-out judge."""
        if self.heldout is not None:
            self.heldout.close()


def build_watchers(watch: Watch, *, device: torch.device | str, keep: Callable[[Reward], Reward] = lambda made: made) -> Watchers:
    """What the recipe wants; ``keep`` puts the held-out judge behind a ledger.

    ValueError where that judge or the reader of text cannot be made.
    """
    section = None if watch.judge is None else watch.judge.reward
    heldout = None if section is None else Judge(build_reward(section, device=device, keep=keep), section.combine)
    texts = [] if watch.text is None else [PaintedTextReward()]
    return Watchers(heldout=heldout, measures=[AppearanceReward(), *texts])
