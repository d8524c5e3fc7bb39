"""Judges that err and abstain like a vision-language model: they add noise to the exact score, round it coarsely, or drop it.

The noise depends only on the task and the image, so the same image always gets the same score, in any order and any batch. The
exact columns are kept, and held-out evaluation uses them. The amounts are assumptions: a standard deviation of a quarter of the
scale, 6 possible scores and 5 % of samples without a score; no vision-language model was measured.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from retouch.config.section import NonNegative, Share
from retouch.core.random import generator
from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores
from retouch_rewards.ocr import OcrReward
from retouch_worlds.rewards import PlaygroundReward


def judged(
    samples: Sequence[Sample], exact: torch.Tensor, *, high: float, noise: float, levels: int, missing: float
) -> torch.Tensor:
    """The scores (b,) of a judge: one of ``levels`` equally spaced values from 0 to ``high``, or NaN if the judge abstains.

    ``noise``: standard deviation of the error before rounding, as a share of the scale. ``missing``: probability of abstaining.
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
    """Adds the column ``judged`` to an exact reward: its column named by ``exact``, with the errors of a vision-language model."""

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
    """The playground's judge of edits, and its ``overall`` column with noise."""

    exact = "overall"
    columns: ClassVar[Mapping[str, Column]] = {**PlaygroundReward.columns, "judged": Column(0.0, 10.0)}


class NoisySigns(_Noisy, OcrReward):
    """The OCR reward, and its ``correctness`` column with noise."""

    exact = "correctness"
    columns: ClassVar[Mapping[str, Column]] = {**OcrReward.columns, "judged": Column(0.0, 1.0)}
