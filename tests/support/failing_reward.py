"""A reward from outside Retouch that scores the brightness of an image and raises an error from a given call on."""

import os
from collections.abc import Mapping, Sequence

import torch
from PIL import ImageStat

from retouch.types import Column, Sample, Scores


class Brightness:
    """Scores between 0 and 1. ``calls``: the number of calls. The environment variable BROKEN_FROM has the number of the first call
    that raises an error. It stands for what a reward needs from its machine, which is not part of the reward's identity."""

    columns: Mapping[str, Column] = {"light": Column(0.0, 1.0)}
    calls = 0

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        type(self).calls += 1
        if self.calls >= float(os.environ.get("BROKEN_FROM", "inf")):
            raise KeyError("size")
        means = [ImageStat.Stat(sample.image.convert("L")).mean[0] / 255 for sample in samples if sample.image is not None]
        return {"light": torch.tensor(means)}
