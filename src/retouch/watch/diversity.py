"""How far the pictures of a group are from each other."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from retouch.distributed.ranks import Ranks
from retouch.rewards.scorers.pixels import to_tensor
from retouch.types import Batch

_SIDE = 32


def group_diversity(batch: Batch, images: Sequence[Image.Image | None], ranks: Ranks) -> float:
    """The root mean square difference, 0 to 1, of two pictures of one group, over all pairs of all groups and all ranks.

    Pictures are compared in RGB at 32 x 32 pixels (by area), so that it is about what they show. The mean squared difference of
    two members of a group is twice their variance (n - 1), which ranks can sum. Rows without a picture are left out; NaN where no
    group has two.
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
