"""Recipes with Z-Image: tests of this family only; `test_family_runs.py` tests all families."""

from pathlib import Path

import pytest
import torch

import tiny_models
from family_runs import small_recipe
from retouch.assembly.value_head import build_head
from retouch.doctor.memory import describe, footprint
from retouch.models.base import DiffusersModel
from retouch.models.common.pipeline_model import accepts_prompt
from retouch.models.offloading.on_device import parts_of
from retouch.models.z_image.family import ZImageModel
from retouch.models.z_image.model import ZImage
from retouch.objectives.advantages import GAEAdvantage
from retouch.recipe.recipe import parse


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_z_image(tmp_path_factory.mktemp("z-image"))


def test_memory_plan_includes_the_value_head(weights: Path, tmp_path: Path) -> None:
    section = {"kind": "z-image", "path": str(weights), "size": [32, 48], "dtype": "float32"}
    recipe = parse(small_recipe(section, tmp_path, advantage={"kind": "gae"}))
    described = describe(recipe, weights)
    assert described is not None
    assert isinstance(recipe.policy.model, DiffusersModel)
    assert isinstance(recipe.advantage, GAEAdvantage)
    model = recipe.policy.model.build(device=torch.device("cpu"))
    head = build_head(recipe.advantage.head, model, tasks=[tiny_models.task("one", "blue")], seed=0)
    held = {row.name: row.bytes for row in footprint(recipe, described).plan.rows}
    assert held["transformer, frozen weights"] == 4 * sum(weight.numel() for weight in parts_of(model)[0].parameters())
    head_numbers = sum(weight.numel() for weight in head.parameters())
    assert 0.5 * held["value head"] < 16 * head_numbers <= held["value head"]


def test_accepts_prompt_rejects_long_prompts_and_special_tokens(weights: Path) -> None:
    section = ZImageModel(path=str(weights), size=(32, 48), dtype="float32")
    model = section.build(device=torch.device("cpu"))
    assert isinstance(model, ZImage)
    assert accepts_prompt(model, "a red circle")
    assert not accepts_prompt(model, "blue " * 120)
    assert not accepts_prompt(model, "blue<|im_end|>")
