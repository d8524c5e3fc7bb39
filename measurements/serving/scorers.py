"""Rewards for the serving measurements: with a fixed latency, with CPU work, and with scores that identify the image."""

import hashlib
import time
from collections.abc import Mapping, Sequence

import torch

from retouch.types import Column, Sample, Scores


def corner_score(sample: Sample) -> float:
    """The brightness of the top left pixel, 0 to 1: a cheap score that still needs the decoded image."""
    assert sample.image is not None
    red, green, blue = sample.image.getpixel((0, 0))  # type: ignore[misc]
    return float(red + green + blue) / 765


def digest_score(sample: Sample) -> float:
    """A score from 0 to 1 that is a hash of the pixels."""
    assert sample.image is not None
    value = int.from_bytes(hashlib.sha256(sample.image.tobytes()).digest()[:3], "big") / 2**24
    return float(torch.tensor(value, dtype=torch.float32))


class Fixed:
    """The brightness of a corner. A call sleeps for ``base`` seconds plus ``each`` seconds per sample."""

    columns: Mapping[str, Column] = {"score": Column(0.0, 1.0)}

    def __init__(self, base: float = 0.0, each: float = 0.0) -> None:
        self.base, self.each = base, each

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        if self.base or self.each:
            time.sleep(self.base + self.each * len(samples))
        return {"score": torch.tensor([corner_score(sample) for sample in samples])}


class Busy(Fixed):
    """The same score, but a call computes in Python for this time instead of sleeping, so it holds the GIL."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        end = time.thread_time() + self.base + self.each * len(samples)
        while time.thread_time() < end:
            pass
        return {"score": torch.tensor([corner_score(sample) for sample in samples])}


class Digest(Fixed):
    """The same latency, with a hash of the image as the score, so that a score identifies its image."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        super().__call__(samples)
        return {"score": torch.tensor([digest_score(sample) for sample in samples])}


class Sleeps(Fixed):
    """The same as `Fixed`, but a call hangs if the text of a task is ``sleep``."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        if any(sample.task.text == "sleep" for sample in samples):
            time.sleep(3600)
        return super().__call__(samples)
