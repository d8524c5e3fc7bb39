"""A recipe of two small steps on the playground, for tests of complete runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import ImageStat

from retouch.types import Column, Sample, Scores

SMALL: dict[str, Any] = {
    "name": "small",
    "steps": 2,
    "tasks_per_step": 2,
    "group_size": 2,
    "learning_rate": 1e-3,
    "policy": {
        "kind": "denoising",
        "model": {"kind": "playground"},
        "train": {"kind": "lora", "rank": 4, "alpha": 8},
        "ema": {"decay": 0.9},
    },
    "rollout": {"num_steps": 3, "transition": {"kind": "cps", "noise_level": 0.7}, "window": {"mode": "window", "size": 1}},
    "data": {"kind": "playground", "complexity": [1], "count": 8},
    "reward": {"kind": "playground", "combine": {"overall": 1}},
    "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4},
    "eval": {"tasks": 4},
}


class RedInCentre:
    """Scores the red of the central 4 x 4 pixels, which is almost always equal for images that differ only by rounding."""

    columns: Mapping[str, Column] = {"red": Column(0.0, 1.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return {"red": torch.tensor([_red(sample) for sample in samples])}


def _red(sample: Sample) -> float:
    assert sample.image is not None
    across, down = (side // 2 for side in sample.image.size)
    return ImageStat.Stat(sample.image.convert("RGB").crop((across - 2, down - 2, across + 2, down + 2))).mean[0] / 255
