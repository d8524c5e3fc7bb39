"""Rewards for benchmarks: of a fixed cost, of work, with scores that prove what was judged; one to be gamed, one that changes."""

import hashlib
import time
from collections.abc import Mapping, Sequence

import torch
from PIL import ImageStat

from retouch.playground.judges.judge import PlaygroundJudge
from retouch.types import Column, Sample, Scores


def corner_score(sample: Sample) -> float:
    """Cheap, and decodes the picture nevertheless."""
    assert sample.image is not None
    red, green, blue = sample.image.getpixel((0, 0))  # type: ignore[misc]
    return float(red + green + blue) / 765


def digest_score(sample: Sample) -> float:
    assert sample.image is not None
    value = int.from_bytes(hashlib.sha256(sample.image.tobytes()).digest()[:3], "big") / 2**24
    return float(torch.tensor(value, dtype=torch.float32))


class Fixed:
    """A corner's brightness; a call costs ``base`` seconds and ``each`` more for every sample, without work."""

    columns: Mapping[str, Column] = {"score": Column(0.0, 1.0)}

    def __init__(self, base: float = 0.0, each: float = 0.0) -> None:
        self.base, self.each = base, each

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        if self.base or self.each:
            time.sleep(self.base + self.each * len(samples))
        return {"score": torch.tensor([corner_score(sample) for sample in samples])}


class Busy(Fixed):
    """The same, and computes all that time without letting go of the interpreter by itself."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        end = time.thread_time() + self.base + self.each * len(samples)
        while time.thread_time() < end:
            pass
        return {"score": torch.tensor([corner_score(sample) for sample in samples])}


class Digest(Fixed):
    """The same with a score that no other picture has."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        super().__call__(samples)
        return {"score": torch.tensor([digest_score(sample) for sample in samples])}


class Glow:
    """Half of what the playground's exact judge says, half the picture's mean luminance."""

    columns: Mapping[str, Column] = {"liking": Column(0.0, 10.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        light = torch.tensor([ImageStat.Stat(sample.image.convert("L")).mean[0] / 255 for sample in samples])
        return {"liking": 0.5 * PlaygroundJudge()(samples)["overall"] + 5 * light}


class Drifting:
    """The exact judge's overall, and a point less from the 400th picture on."""

    columns: Mapping[str, Column] = {"overall": Column(-1.0, 10.0)}
    seen = 0

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        type(self).seen += len(samples)
        return {"overall": PlaygroundJudge()(samples)["overall"] - float(self.seen > 400)}
