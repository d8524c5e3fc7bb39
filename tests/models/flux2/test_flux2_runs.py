"""Recipes with FLUX.2-klein: tests of this family only; `test_family_runs.py` tests all families."""

import json
from pathlib import Path

import pytest

import tiny_flux2
from family_runs import metrics_rows, small_recipe
from retouch.models.flux2.family import Flux2KleinModel
from retouch.models.sizes import parameter_count, stored_count
from retouch.recipe.recipe import load, parse
from retouch.run.session import run

FAMILY = Flux2KleinModel(path="black-forest-labs/FLUX.2-klein-base-4B")
RECIPE = "recipes/flux2/ocr-grpo.jsonnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux2.save(tmp_path_factory.mktemp("flux2"))


def test_step_distilled_weights_train_without_guidance_and_raise_with_it(tmp_path: Path) -> None:
    weights = tiny_flux2.save(tmp_path / "distilled", distilled=True)
    made = small_recipe({"kind": "flux2-klein", "path": str(weights), "size": [64, 96]}, tmp_path, steps=1)
    assert run(parse(made), fresh=False) == 0
    made["rollout"]["guidance_scale"] = 2.0
    with pytest.raises(ValueError, match="step-distilled weights sample without guidance"):
        run(parse(made | {"name": "guided"}), fresh=False)


def test_recipe_runs_one_step_with_a_tiny_model(weights: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "words.txt"
    prompts.write_text('a sign that says "open"\na door with "push" on it\na shop called "Azir"\n')
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "ranks": "null", "out": tmp_path, "device": "cpu", "minibatches": 1}
    model = {"policy.model.path": weights, "policy.model.size": [64, 96], "policy.model.dtype": "float32"}
    sizes = {"data.path": prompts, "data.held_out": 1, "eval.tasks": 1, "eval.num_steps": 2, "rollout.num_steps": 3, "trackers": []}
    judge = {"reward": json.dumps({"kind": "share", "channel": "red", "combine": {"share": 1}})}
    recipe = load(RECIPE, [f"{key}={value}" for key, value in (small | model | sizes | judge).items()])
    assert run(recipe, fresh=False) == 0
    assert metrics_rows(recipe)[0]["policy/ratio_max_first"] <= 1e-5


@pytest.mark.parametrize(
    ("path", "transformer", "text_encoder"),
    [("FLUX.2-klein-base-4B", 3_875_544_576, 4.02e9), ("FLUX.2-klein-9B", 9_078_581_248, 7.57e9)],
)
def test_parameter_counts_match_the_published_models(path: str, transformer: int, text_encoder: float) -> None:
    parts = Flux2KleinModel(path=path).published()
    assert parts is not None
    assert parameter_count(parts["transformer"]) == transformer
    assert parameter_count(parts["text_encoder"]) == pytest.approx(text_encoder, rel=0.002)
    assert parameter_count(parts["vae"]) == 84_046_115
    assert stored_count(parts["vae"]) == 84_046_115 + 2 * 128 + 1, "the running statistics are part of the weights"
    assert Flux2KleinModel(path="somebody/else").published() is None
