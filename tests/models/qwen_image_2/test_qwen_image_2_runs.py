"""Recipes with Qwen-Image-2.1: tests of this family only; `test_family_runs.py` tests all families."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_qwen_image_2
from family_runs import description_of, metrics_rows, write_edits
from measured_memory import saved_bytes
from retouch.memory.plan import Setup, activation_bytes
from retouch.memory.sizes import parameter_count
from retouch.models.qwen_image_2.family import QwenImage2Model
from retouch.recipe.recipe import load
from retouch.session.session import run

FAMILY = QwenImage2Model(path="Qwen/Qwen-Image-2.1")
RECIPE = "recipes/qwen-image-2/flow-grpo.jsonnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image_2.save(tmp_path_factory.mktemp("qwen-image-2"))


def test_recipe_runs_one_step_with_a_tiny_model(weights: Path, tmp_path: Path) -> None:
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "ranks": "null", "out": tmp_path, "device": "cpu", "minibatches": 1}
    model = {"path": weights, "size": [64, 96], "dtype": "float32", "source_area": 64**2}
    sizes = {"data.path": write_edits(tmp_path), "data.held_out": 1, "eval.tasks": 1, "eval.num_steps": 6, "rollout.num_steps": 6}
    small |= {f"policy.model.{key}": value for key, value in model.items()} | sizes | {"trackers": [], "eval.batch": 1}
    small["reward"] = '{"kind": "photos", "colour": [200, 60, 40], "combine": {"reward": 1}}'  # needs no weights
    recipe = load(RECIPE, [f"{key}={value}" for key, value in small.items()])
    assert run(recipe, fresh=False) == 0
    assert metrics_rows(recipe)[0]["policy/ratio_max_first"] <= 1e-5


def test_parameter_counts_match_the_published_model() -> None:
    """Transformer: computed by hand. Text encoder (Qwen3-VL-8B): the known count without the head of 0.62 billion."""
    parts = FAMILY.published()
    assert parts is not None
    width, text, latents = 4096, 4096, 64
    block = 4 * width**2 + 3 * 3 * width**2 + 2 * 128  # no biases; norms of queries and keys have weights, and no others
    ends = 2 * latents * width + (text + width) * width + text  # tokens in and out, and the text with its norm
    time = (256 + width) * width + (4 + 1) * width**2  # its embedding, and the modulation of all blocks and of the last norm
    assert parameter_count(parts["transformer"]) == 32 * block + ends + time == 7_115_124_736
    assert parameter_count(parts["text_encoder"]) == pytest.approx(8.77e9 - 151_936 * width, rel=0.002)
    assert parameter_count(parts["vae"]) == 337_740_404


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_activation_bytes_approximate_what_autograd_saves(dtype: torch.dtype) -> None:
    part = description_of(tiny_qwen_image_2.transformer())
    part["config"] |= {"num_layers": 8, "num_attention_heads": 4}
    module = type(tiny_qwen_image_2.transformer())(**part["config"]).to(dtype).train()
    mask = torch.arange(40 + 256 // 4)[None] >= 40
    inputs: dict[str, Any] = {"hidden_states": torch.randn(1, 256, 8, dtype=dtype), "timestep": torch.tensor([0.5])}
    inputs |= {"encoder_hidden_states": torch.randn(1, 40, 32, dtype=dtype), "img_shapes": [[(1, 16, 16)]], "img_mask": mask}
    setup: dict[str, Any] = {"lora": None, "rows": 1, "tokens": 296, "dtype": dtype}
    measured, shape = saved_bytes(lambda: module(**inputs), module), FAMILY.shape(part)
    assert activation_bytes(shape, Setup(**setup, gradient_checkpointing=False)) == pytest.approx(measured, rel=0.2)
    module.enable_gradient_checkpointing()
    assert saved_bytes(lambda: module(**inputs), module) < activation_bytes(shape, Setup(**setup)) < measured
