"""Checkpoints of sharded state: written with memory for a few tensors, and read by any number of ranks."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rank_commands import SUPPORT, on_ranks

NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(scope="module", params=[pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The kind of sharding, and the folder in which two ranks left a checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    run(2, request.param, folder, "begin")
    return request.param, folder


def run(ranks: int, kind: str, folder: Path, mode: str, dtype: str = "float32") -> dict[str, Tensor]:
    """What ``ranks`` ranks end with."""
    on_ranks(ranks, [str(SUPPORT / "sharded_states.py"), kind, str(folder), mode, dtype], folder / f"logs-{ranks}")
    return load_file(folder / f"{ranks}.safetensors")


@pytest.mark.slow
def test_saving_a_sharded_checkpoint_needs_memory_for_less_than_four_tensors(saved: tuple[str, Path]) -> None:
    found: dict[str, Any] = json.loads((saved[1] / "2.json").read_text())
    assert sum(found["state"].values()) > 60 * found["largest"]
    assert found["held"] < 4 * found["largest"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_sharded_checkpoint_resumes_on_other_numbers_of_ranks(saved: tuple[str, Path], ranks: int) -> None:
    kind, folder = saved
    wanted = load_file(folder / "2.safetensors")
    found = run(ranks, kind if ranks > 1 else "alone", folder, "continue")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6, msg=name)
    moved = (wanted["blocks.0.linear.weight"] - wanted["reference/blocks.0.linear.weight"]).abs().max()
    assert moved > 1e-3
    measured: dict[str, Any] = json.loads((folder / f"{ranks}.json").read_text())
    moments = measured["state"]["optimizer"] / ranks  # this rank's share; the weights exist before the checkpoint is read
    assert measured["held"] < moments + measured["largest"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"])
def test_master_weights_are_saved_by_two_ranks_and_continued_by_one(tmp_path: Path, kind: str) -> None:
    wanted = run(2, kind, tmp_path, "begin", "bfloat16")
    found = run(1, "alone", tmp_path, "continue", "bfloat16")
    assert found.keys() == wanted.keys()
    masters = [name for name in found if name.endswith("/master")]
    assert len(masters) == 48
    for name in masters:
        # Gradients in bf16 depend on the number of rows that a rank sums, and Adam scales all of them to the learning rate of 1e-3.
        assert (found[name] - wanted[name]).abs().mean() < 2e-5, name
        weight = wanted[name.removesuffix("/master")]
        assert torch.equal(wanted[name].bfloat16(), weight)
        assert weight.numel() == 3 or not torch.equal(wanted[name], weight.float())
