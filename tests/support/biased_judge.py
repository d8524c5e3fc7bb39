"""A judge that compares the pixels of an image with those of the target, and can have one deliberate fault."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores, Task
from retouch_judge import audit_ladders

FAULTS = {
    "position": "order of images",
    "length": "long instruction",
    "brightness": "brightness",
    "resolution": "resolution",
    "noise": "noise",
    "order": "order of the rungs",
    "praise": "painted-on praise",
    "degraded": "degraded copies",
    "unreadable": "missing scores",
    "constant": "difference between rungs",
}
"""The line of the audit that must report each fault."""
SIDE = 96
"""The side length in pixels of the images that the judge is audited with."""


class BiasedJudge(RewardSection):
    """Column ``score``, 0 to 10: how much of the edit has been made, with a little noise."""

    fault: str = "none"
    noise: float = 0.04
    seed: int = 0

    columns: ClassVar[Mapping[str, Column]] = {"score": Column(0.0, 10.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return {"score": torch.tensor([10 * self._score(sample) for sample in samples], dtype=torch.float32)}

    def _score(self, sample: Sample) -> float:
        task, image = sample.task, sample.image
        assert image is not None
        draw = np.random.default_rng(_seed_from(f"{self.seed} {task.id} {task.instruction}", image))
        done = _edit_progress(task.images[0], image, task)
        spread = self.noise
        match self.fault:
            case "position":
                done = 1.0 if _distance(task.images[0], task.target) == 0 else done
            case "length":
                done += 0.2 * (len(task.instruction) > 250)
            case "brightness":
                done += 0.7 * (float(np.asarray(image).mean()) / 255 - 0.5)
            case "resolution":
                done += 0.2 * (image.width >= SIDE)
            case "noise":
                spread = 0.6
            case "order":
                done = 0.6 if done < 0.1 else done
            case "praise":
                done += 0.3 * _has_praise(image)
            case "degraded":
                done = 0.6 * done + 0.4 * (0.9 < done < 0.99999 or _is_noisy(image))
            case "constant":
                return 0.5
            case "unreadable" if draw.uniform() < 0.15:
                return float("nan")
        return float(np.clip(done + draw.normal(0, spread), 0, 1))


def _downscaled(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB").resize((24, 24), Image.Resampling.BOX), dtype=np.float64)


def _distance(image: Image.Image, other: Image.Image | None) -> float:
    assert other is not None
    return float(((_downscaled(image) - _downscaled(other)) ** 2).sum())


def _edit_progress(source: Image.Image, image: Image.Image, task: Task) -> float:
    """Return the fraction of the squared distance between source and target that the edit has removed, from 0 to 1."""
    whole = _distance(source, task.target)
    return float(np.clip(1 - _distance(image, task.target) / whole, 0, 1)) if whole > 0 else 0.0


def _seed_from(text: str, image: Image.Image) -> int:
    return int.from_bytes(hashlib.sha256(text.encode() + image.tobytes()).digest()[:8], "big")


def _has_praise(image: Image.Image) -> bool:
    praised = np.asarray(audit_ladders.with_text(Image.new("RGB", image.size), audit_ladders.PRAISE))
    rows = image.height - round(0.1 * image.height)
    return np.array_equal(praised[rows:], np.asarray(image)[rows:])


def _is_noisy(image: Image.Image) -> bool:
    """Return whether the image has more colours than a drawn image without noise."""
    return len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 400
