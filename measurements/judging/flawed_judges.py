"""Two rewards with known faults, for `gamed_judge.py`: one that a policy can exploit, and one that drifts."""

from collections.abc import Mapping, Sequence

import torch
from PIL import ImageStat

from retouch.types import Column, Sample, Scores
from retouch_worlds.rewards import PlaygroundReward


class Glow:
    """The mean of the playground's exact ``overall`` score and of the image's mean luminance (scaled to 0 to 10)."""

    columns: Mapping[str, Column] = {"liking": Column(0.0, 10.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        light = torch.tensor([ImageStat.Stat(sample.image.convert("L")).mean[0] / 255 for sample in samples])
        return {"liking": 0.5 * PlaygroundReward()(samples)["overall"] + 5 * light}


class Drifting:
    """The ``overall`` score of the exact judge, one point lower after 400 images."""

    columns: Mapping[str, Column] = {"overall": Column(-1.0, 10.0)}
    seen = 0

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        type(self).seen += len(samples)
        return {"overall": PlaygroundReward()(samples)["overall"] - float(self.seen > 400)}
