"""Recipes with Z-Image: tests of this family only; `test_family_runs.py` tests all families."""

from pathlib import Path

import pytest
import torch

import tiny_models
from retouch.models.common.pipeline_model import accepts_prompt
from retouch.models.z_image.family import ZImageModel
from retouch.models.z_image.model import ZImage


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_z_image(tmp_path_factory.mktemp("z-image"))


def test_accepts_prompt_rejects_long_prompts_and_special_tokens(weights: Path) -> None:
    section = ZImageModel(path=str(weights), size=(32, 48), dtype="float32")
    model = section.build(device=torch.device("cpu"))
    assert isinstance(model, ZImage)
    assert accepts_prompt(model, "a red circle")
    assert not accepts_prompt(model, "blue " * 120)
    assert not accepts_prompt(model, "blue<|im_end|>")
