"""The share of one colour channel in all light of a picture: the simplest thing to learn, for benchmarks and first runs."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.rewards.scorers.pixels import to_tensor
from retouch.types import Column, Sample, Scores

Channel: TypeAlias = Literal["red", "green", "blue"]


class ShareReward:
    """Column ``share``, 0 to 1: the mean over the pixels of channel / (red + green + blue), where a black pixel counts 1/3.

    A sample without a picture is the policy's own fault: 0. ValueError: an unknown channel.
    """

    columns: Mapping[str, Column] = {"share": Column(0.0, 1.0)}

    def __init__(self, channel: Channel = "red") -> None:
        if channel not in get_args(Channel):
            raise ValueError(f"channel {channel!r}: choose red, green or blue")
        self._channel = get_args(Channel).index(channel)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        shares = [0.0 if sample.image is None else float(self._share(sample.image)) for sample in samples]
        return {"share": torch.tensor(shares, dtype=torch.float32)}

    def _share(self, image: Image) -> Float[Tensor, ""]:
        pixels = to_tensor(image)
        light = pixels.sum(dim=2)
        share = pixels[:, :, self._channel] / light.masked_fill(light == 0, 1)
        return share.masked_fill(light == 0, 1 / 3).mean()
