"""The settings of small runs of ``retouch.Trainer``, and a bitwise comparison of their results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import retouch

SMALL: dict[str, Any] = {
    "peft_config": retouch.Lora(rank=4, alpha=8, targets=["attn.to_q", "attn.to_v"]),
    "steps": 3,
    "tasks_per_step": 2,
    "group_size": 2,
    "rollout": {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}},
    "learning_rate": 1e-2,
    "device": "cpu",
    "size": (32, 32),
    "trackers": (),
    "samples": {"every": 2, "tasks": 1, "groups": 1},
    "progress": False,
}


@retouch.reward(low=0, high=1)
def redness(images: list[Any], **rest: Any) -> list[float]:
    """Return the mean of the red channel, from 0 to 1."""
    return [float(np.asarray(image)[..., 0].mean() / 255) for image in images]


def run_results(folder: Path) -> dict[str, Any]:
    """Return the metrics and the newest checkpoint of a run.

    The state of Python's generator is left out: beartype, which checks types in tests, uses it.
    """
    newest = max((folder / "checkpoints").glob("step-*"))
    tensors = {f"{file.name}/{name}": tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {"metrics": (folder / "metrics.jsonl").read_text(), **tensors, "random.safetensors/python": torch.zeros(1)}


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one["metrics"] == other["metrics"]
    assert one.keys() == other.keys()
    tensors = [name for name, value in one.items() if name != "metrics"]
    assert [name for name in tensors if not torch.equal(one[name].nan_to_num(7), other[name].nan_to_num(7))] == []
