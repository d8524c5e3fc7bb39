"""Rewards for the serving benchmarks: of a fixed cost, of work for the CPU, and with scores that prove which image was scored."""

import hashlib
import time
from collections.abc import Mapping, Sequence

import torch

from retouch.types import Column, Sample, Scores


def corner_score(sample: Sample) -> float:
    """Cheap, and decodes the image nevertheless."""
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
    """The same with a score that no other image has."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        super().__call__(samples)
        return {"score": torch.tensor([digest_score(sample) for sample in samples])}


class Sleeps(Fixed):
    """The same, and does not return for a sample whose task says ``sleep``."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        if any(sample.task.text == "sleep" for sample in samples):
            time.sleep(3600)
        return super().__call__(samples)
