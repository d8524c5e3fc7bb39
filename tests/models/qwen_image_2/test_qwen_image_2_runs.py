"""Recipes with Qwen-Image-2.1: tests of this family only; `test_family_runs.py` tests all families."""

from pathlib import Path

import pytest

import tiny_qwen_image_2
from family_runs import metrics_rows, write_edits
from retouch.models.qwen_image_2.family import QwenImage2Model
from retouch.models.sizes import parameter_count
from retouch.recipe.recipe import load
from retouch.run.session import run

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
