"""The share of one colour channel in all light of an image: the simplest thing to learn, for benchmarks and first runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from PIL.Image import Image

from retouch.rewards.base import RewardSection
from retouch.rewards.scorers.pixels import to_tensor
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_CHANNELS = ("red", "green", "blue")


class ShareReward(RewardSection):
    """The share of one colour channel in all light of the image.

    Column ``share``, 0 to 1: the mean over the pixels of channel / (red + green + blue), where a black pixel counts 1/3.
    """

    kind: Literal["share"] = "share"
    channel: Literal["red", "green", "blue"] = "red"
    """Which channel."""

    columns: ClassVar[Mapping[str, Column]] = {"share": Column(0.0, 1.0)}
    shorthand = "channel"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. A sample without an image scores 0."""
        import torch

        shares = [0.0 if sample.image is None else float(self._share(sample.image)) for sample in samples]
        return {"share": torch.tensor(shares, dtype=torch.float32)}

    def _share(self, image: Image) -> Float[Tensor, ""]:
        pixels = to_tensor(image)
        light = pixels.sum(dim=2)
        share = pixels[:, :, _CHANNELS.index(self.channel)] / light.masked_fill(light == 0, 1)
        return share.masked_fill(light == 0, 1 / 3).mean()
