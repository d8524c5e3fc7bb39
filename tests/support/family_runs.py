"""Helpers for tests of a family of image models: recipes of a few small steps, and checks of an adapter."""

import json
from pathlib import Path
from typing import Any

import torch

import tiny_flux_runs
import tiny_models
from retouch.protocols import DenoisingModel
from retouch.types import Conditioning


def small_recipe(model: dict[str, Any], root: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe for a run on three prompts."""
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle on a green square\nblue\ngreen\n")
    made = tiny_flux_runs.small(model, prompts, root / "runs")
    return made | {"data": {"kind": "prompts", "path": str(prompts), "held_out": 1}} | changes


def write_edits(root: Path) -> Path:
    """Write a folder of three images, each with an instruction."""
    folder = root / "photos"
    folder.mkdir()
    for number in range(3):
        tiny_models.image(number, 64, 64).save(folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "instruction": "make it red"} for number in range(3)]
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def check_gradient_checkpointing(model: DenoisingModel, conditioning: Conditioning, *, trained: str) -> None:
    """Check that gradient checkpointing changes no gradient. ``trained``: the name prefix of some weights that have a gradient."""
    x = model.initial_noise(conditioning, tiny_models.generators(2))
    module: Any = model.module

    def gradients() -> dict[str, torch.Tensor]:
        module.zero_grad()
        model.velocity(module, x, torch.tensor([0.5, 0.2]), conditioning).square().mean().backward()
        return {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}

    plain = gradients()
    module.enable_gradient_checkpointing()
    again = gradients()
    assert plain.keys() == again.keys()
    assert any(name.startswith(trained) and grad.any() for name, grad in plain.items())
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-5)
