"""Measurements of images besides the training reward: a held-out judge, image statistics and group diversity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from retouch.distributed.ranks import Ranks
from retouch.protocols import Reward
from retouch.recipe.watch import Watch
from retouch.rewards.judging import RewardScorer
from retouch.rewards.scorers.appearance import AppearanceReward
from retouch.rewards.scorers.pixels import to_tensor
from retouch.rewards.text.unrequested_text import UnrequestedTextReward
from retouch.types import Batch, Sample, Scores

_SIDE = 32


@dataclass(frozen=True, kw_only=True)
class WatchMeasures:
    """The measures of ``watch``. ``heldout``: a judge that is not used for training, or None. ``measures``: rewards without a
    judge."""

    heldout: RewardScorer | None
    measures: Sequence[Reward]

    def measure(self, samples: Sequence[Sample]) -> Scores:
        """Return the columns of every measure, each (b,); NaN for a sample without an image."""
        scores: Scores = {}
        rows = [row for row, sample in enumerate(samples) if sample.image is not None]
        for reward in self.measures:
            columns = reward([samples[row] for row in rows])
            for name in reward.columns:
                scores[name] = torch.full((len(samples),), torch.nan)
                scores[name][rows] = columns[name]
        return scores

    def close(self) -> None:
        """Close the held-out judge."""
        if self.heldout is not None:
            self.heldout.close()


def build_measures(
    watch: Watch, *, device: torch.device | str, cached: Callable[[Reward], Reward] = lambda reward: reward
) -> WatchMeasures:
    """Build the measures of the recipe's ``watch``. ``cached``: wraps the held-out judge in the ledger's cache.

    Raises ValueError if the held-out judge or the OCR model cannot be built.
    """
    section = None if watch.judge is None else watch.judge.reward
    heldout = None if section is None else RewardScorer(section.build(device=device, keep=cached), section.combine)
    texts = [] if watch.text is None else [UnrequestedTextReward()]
    return WatchMeasures(heldout=heldout, measures=[AppearanceReward(), *texts])


def group_diversity(batch: Batch, images: Sequence[Image.Image | None], ranks: Ranks) -> float:
    """Return the root mean square difference, 0 to 1, of two images of a group, over all pairs of all groups and all ranks.

    Images are compared in RGB at 32 x 32 pixels (area-averaged), so content counts and fine detail does not. The mean squared
    difference of two images of a group is twice the group's sample variance, whose sums can be added over ranks. Rows without an
    image are left out; NaN if no group has two images.
    """
    groups = int(ranks.max(torch.tensor(float(max(batch.group_ids)))).item()) + 1
    sums = torch.zeros(groups, 2 + 3 * _SIDE * _SIDE, dtype=torch.float64)
    for group, image in zip(batch.group, images, strict=True):
        if image is not None:
            small = _thumbnail(image)
            sums[batch.group_ids[group]] += torch.cat([torch.ones(1, dtype=torch.float64), small.square().sum()[None], small])
    sums = ranks.sum(sums)
    sums = sums[sums[:, 0] > 1]
    count, squares, total = sums[:, 0], sums[:, 1], sums[:, 2:]
    variance = (squares - total.square().sum(dim=1) / count).clamp(min=0) / (count - 1)
    pairs = count * (count - 1)
    return float(((2 * variance / total.shape[1] * pairs).sum() / pairs.sum()).sqrt())


def _thumbnail(image: Image.Image) -> Float[Tensor, " n"]:
    return to_tensor(image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX)).flatten()
