"""Rewards for test servers: a reward whose score identifies the judged image, and rewards with faults."""

import hashlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from retouch.types import Column, Sample, Scores


def digest_score(sample: Sample) -> float:
    """Return a score from 0 to 1 that is different for every image and task."""
    assert sample.image is not None
    what = f"{sample.task.id} {sample.image.mode} {sample.image.size}".encode() + sample.image.tobytes()
    value = int.from_bytes(hashlib.sha256(what).digest()[:3], "big") / 2**24
    return float(torch.tensor(value, dtype=torch.float32))


class Digest:
    """Returns scores that identify image and task. ``base``, ``each``: the seconds that a call and each of its samples take."""

    columns: Mapping[str, Column] = {"digest": Column(0.0, 1.0), "odd": Column(0.0, 1.0, diagnostic=True)}

    def __init__(self, base: float = 0.0, each: float = 0.0) -> None:
        self.base, self.each = base, each
        self.sizes: list[int] = []

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        self.sizes.append(len(samples))
        if self.base or self.each:
            time.sleep(self.base + self.each * len(samples))
        scores = [digest_score(sample) for sample in samples]
        odd = [1.0 if len(sample.task.id) % 2 else float("nan") for sample in samples]
        return {"digest": torch.tensor(scores), "odd": torch.tensor(odd)}


class WithPid(Digest):
    """Adds a column with the id of the process that computed the score."""

    columns: Mapping[str, Column] = {**Digest.columns, "pid": Column(0.0, 2.0**23)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return {**super().__call__(samples), "pid": torch.full((len(samples),), float(os.getpid()))}


class WaitsForFile(Digest):
    """Waits until the file ``gate`` exists, then scores."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = Path(gate)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().__call__(samples)


class FailsOnText(Digest):
    """Raises, or returns a score out of range, a missing score or too few scores; the task's text selects the fault."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        scores = super().__call__(samples)
        for row, sample in enumerate(samples):
            match sample.task.text:
                case "raise":
                    raise RuntimeError(f"secret-of-the-server {sample.task.id}")
                case "lie":
                    scores["digest"][row] = 7.0
                case "unknown":
                    scores["digest"][row] = float("nan")
        if any(sample.task.text == "short" for sample in samples):
            return {"digest": scores["digest"][:-1], "odd": scores["odd"]}
        return scores


class Sleeps(Digest):
    """Does not return for a sample whose task's text is "sleep", until ``Sleeps.wake`` is set."""

    wake = threading.Event()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        if any(sample.task.text == "sleep" for sample in samples):
            self.wake.wait(timeout=600)
        return super().__call__(samples)
