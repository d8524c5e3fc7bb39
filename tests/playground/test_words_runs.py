"""The recipes of the playground's word tasks: each loads, trains one step, and is evaluated by the reward that reads the words."""

import json
import math

import pytest

from retouch.cli import main
from retouch.config.packaged import available
from retouch.recipe.recipe import load
from retouch.run.build import build_sets
from slow_params import slow_except

RECIPES = [name for name in available() if "playground/words-" in name]
SMALL = ("tasks_per_step=2", "group_size=4", "steps=1", "microbatch=8", "eval.tasks=3", "eval.every=0", "eval.best_of_k=0")
QUIET = ("samples.tasks=1", "samples.every=0", "trackers=[]", "device=cpu")


def test_word_recipes_exist_for_every_listed_algorithm():
    ways = {name.rpartition("words-")[2].removesuffix(".jsonnet") for name in RECIPES}
    assert ways >= {"grpo", "nft", "supervised", "ppo", "ppo-value", "awm", "dpo"}


@pytest.mark.parametrize(
    "name", slow_except(["recipes/playground/words-grpo.jsonnet", "recipes/playground/words-nft.jsonnet"], RECIPES)
)
def test_every_word_recipe_trains_one_step_and_is_evaluated(name, tmp_path):
    more = ["tasks_per_step=4", "group_size=1"] if load(name).group_size == 1 else []
    settings = [*SMALL, *QUIET, *more, f"out={tmp_path}", "name=run"]
    assert main(["train", name, *(part for setting in settings for part in ("--set", setting))]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["column"] == "correctness"
    assert summary["ceiling"] > 0.8
    assert line["policy/grad_norm"] > 0
    (timed,) = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    assert math.isfinite(timed["cpu/step"])
    assert timed["cpu/step"] > 0


def test_evaluation_words_are_spelled_correctly_and_not_in_the_training_data():
    recipe = load("recipes/playground/words-supervised.jsonnet")
    assert recipe.data.wrong_letters == 0.5
    sets = build_sets(recipe, recipe.data, size=None)
    assert not {task.text for task in sets.train[:200]} & {task.text for task in sets.heldout}
    assert recipe.eval_data().wrong_letters == 0


def test_style_from_reference_applies_to_training_and_held_out_tasks():
    plain = load("recipes/playground/words-supervised.jsonnet")
    assert "style_from_reference" not in plain.document()["data"]
    recipe = load("recipes/playground/words-supervised.jsonnet", ["data.style_from_reference=true"])
    assert recipe.document()["data"]["style_from_reference"] is True
    sets = build_sets(recipe, recipe.data, size=None)
    for task in (sets.train[0], sets.heldout[0]):
        assert task.images[0].getpixel(task.mask.getbbox()[:2]) not in {colour for _, colour in task.reference.getcolors()}


def test_a_model_that_does_not_match_the_inputs_of_the_data_raises():
    with pytest.raises(ValueError, match="playground has no masks, and playground-words takes one image and a mask"):
        load("recipes/quickstart.jsonnet", ["policy.model.kind=playground-words"])
    with pytest.raises(ValueError, match="playground-words has source images, which playground-text-to-image does not take"):
        load("recipes/playground/words-grpo.jsonnet", ["policy.model.kind=playground-text-to-image"])
