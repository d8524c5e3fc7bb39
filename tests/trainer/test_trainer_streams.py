"""Training on a stream: the same bits after a stop, whatever is read in advance, with the place in the stream in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import retouch
import tiny_pipelines
from retouch.data.sources.stream import IterableData

SMALL: dict[str, Any] = {
    "peft_config": retouch.Lora(rank=4, alpha=8, targets=["attn.to_q", "attn.to_v"]),
    "steps": 4,
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
    """The mean of the red channel."""
    return [float(np.asarray(image)[..., 0].mean() / 255) for image in images]


def stream(count: int = 8) -> datasets.IterableDataset:
    rows = [{"prompt": f"a red circle {number}", "id": str(number)} for number in range(count)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)


def trainer(out: Path, **changes: Any) -> retouch.Trainer:
    data = IterableData.of(stream(), held_out=2, check=2, shuffle=3, ahead=changes.pop("ahead", 1))
    options = {"model": tiny_pipelines.sd3(), "reward_funcs": redness, "train_dataset": data, **SMALL, **changes}
    return retouch.Trainer(**options, output_dir=out, run_name="run")


def bits(folder: Path) -> dict[str, Any]:
    """The metrics and the newest checkpoint; without Python's generator, which beartype uses in tests."""
    newest = max((folder / "checkpoints").glob("step-*"))
    tensors = {f"{file.name}/{name}": tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {"metrics": (folder / "metrics.jsonl").read_text(), **tensors, "random.safetensors/python": torch.zeros(1)}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert one["metrics"] == other["metrics"]
    changed = [name for name in one if name != "metrics" and not torch.allclose(one[name], other[name], 0, 0, equal_nan=True)]
    assert changed == []


def test_a_run_that_is_left_early_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    for step in trainer(tmp_path / "parts"):
        if step.step == 3:
            break
    newest = max((tmp_path / "parts" / "run" / "checkpoints").glob("step-*"))
    (stored,) = json.loads((newest / "state.json").read_text())["numbers"]["streams"]
    assert stored["shards"] == 2
    assert stored["cursor"]["position"] == 3  # of 6 rows; the three steps drew rows 0 to 5
    rest = trainer(tmp_path / "parts", ahead=0)
    assert rest.train() is not None
    assert_same(bits(whole.folder), bits(rest.folder))


def test_a_stream_is_passed_as_it_is_and_evaluated_on_a_table(tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_dataset": stream(), "eval_dataset": [{"prompt": "a red circle"}], "steps": 1}
    made = trainer(tmp_path, **given)
    assert made.recipe.data.label == "iterable"
    assert made.train() is not None
    assert made.evaluate()["all"]["n"] == 1


def test_passes_over_a_stream_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="passes: the number of rows of a stream is not known; give `steps` instead"):
        trainer(tmp_path, steps=None, passes=1.0).train()
