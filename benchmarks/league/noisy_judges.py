"""Judges that err and abstain like a vision-language model: the exact score with noise, rounded to a coarse scale, or none.

The noise depends on the task and the image alone, so the same image always gets the same score, in any order and any batch. The
exact columns stay, and held-out evaluation reads these. The amounts are assumptions: a standard deviation of a quarter of the
scale, 6 possible scores and 5 % without an answer; no vision-language model was measured.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from retouch.config.section import NonNegative, Share
from retouch.core.random import generator
from retouch.rewards.base import RewardSection
from retouch.rewards.playground.edit_judge import PlaygroundReward
from retouch.rewards.text.ocr import OcrReward
from retouch.types import Column, Sample, Scores


def judged(
    samples: Sequence[Sample], exact: torch.Tensor, *, high: float, noise: float, levels: int, missing: float
) -> torch.Tensor:
    """The scores (b,) of a judge on a scale from 0 to ``high`` of ``levels`` equally distant scores; NaN where it abstains.

    ``noise``: standard deviation of its error before rounding, as a share of the scale. ``missing``: probability that it abstains.
    """
    found = []
    for sample, score in zip(samples, exact.tolist(), strict=True):
        assert sample.image is not None, "a scorer passes only samples with an image"
        seen = hashlib.sha256(sample.image.tobytes()).hexdigest()
        key = generator("noisy judge", sample.task.id, seen)
        error, abstains = torch.randn((), generator=key).item(), torch.rand((), generator=key).item() < missing
        share = min(1.0, max(0.0, score / high + noise * error))
        found.append(math.nan if abstains else high * round(share * (levels - 1)) / (levels - 1))
    return torch.tensor(found)


class _Noisy(RewardSection):
    """Adds the column ``judged`` to an exact reward: its column ``exact`` as a vision-language model might score it."""

    noise: NonNegative = 0.25
    """Standard deviation of the error, as a share of the scale."""
    levels: int = 6
    """Number of possible scores."""
    missing: Share = 0.05
    """Share of samples without a score."""

    exact: ClassVar[str]

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        scores = super().__call__(samples)
        how = {"noise": self.noise, "levels": self.levels, "missing": self.missing}
        return {**scores, "judged": judged(samples, scores[self.exact], high=self.columns["judged"].high, **how)}


class NoisyEdits(_Noisy, PlaygroundReward):
    """The playground's judge of edits, with noise on ``overall``."""

    exact = "overall"
    columns: ClassVar[Mapping[str, Column]] = {**PlaygroundReward.columns, "judged": Column(0.0, 10.0)}


class NoisySigns(_Noisy, OcrReward):
    """The reading of signs, with noise on ``correctness``."""

    exact = "correctness"
    columns: ClassVar[Mapping[str, Column]] = {**OcrReward.columns, "judged": Column(0.0, 1.0)}
