"""The forecast of `retouch doctor --estimate`: which target applies to a recipe, and the calculation of its hours."""

from retouch.recipe.recipe import load
from retouch_plan.estimate import TARGETS, forecast_of

OTHERS = ("playground/nft", "flux2/ocr-grpo", "sd3/prompt-enhancer")
"""Recipes of another model, task or algorithm."""
EMU3 = ("sft_s", "sft_s__rl_s", "sft_s__rl_sc", "sft_s__rl_sc-published", "sft_sc__rl_sc", "sft_think_s__rl_sc")


def test_only_recipes_of_the_same_model_task_and_algorithm_have_a_target():
    names = [*OTHERS, "playground/grpo", "sd3/ocr-grpo", *(f"emu3/{name}" for name in EMU3)]
    found = {name: each.target for name in names for each in TARGETS if each.fits(load(name))}
    assert found == {
        "playground/grpo": "a quarter of the gap on the playground's compound edits",
        "sd3/ocr-grpo": "OCR correctness of 0.90, from 0.59",
        "emu3/sft_s__rl_sc": "VIEScore of 4.80 on six benchmarks, from 3.88",
        "emu3/sft_s__rl_sc-published": "VIEScore of 4.80 on six benchmarks, from 3.88",
    }


def test_other_tasks_of_the_playground_and_several_phases_have_no_target():
    single = load("playground/grpo", ['data.complexity={"1": 1}'])
    phases = load("playground/grpo", ["steps=null", 'phases=[{"name": "one", "steps": 2}, {"name": "two", "steps": 2}]'])
    assert not any(each.fits(recipe) for recipe in (single, phases) for each in TARGETS)


def test_forecast_is_published_steps_times_the_time_of_a_step():
    found = forecast_of(load("sd3/ocr-grpo"), 0.006, "32 x h100")
    assert found.status == "note"
    first, caution, basis = found.text.splitlines()
    assert first == (
        "OCR correctness of 0.90, from 0.59: 3.0 h to 6.0 h on 32 x h100 (500 to 1,000 steps, without evaluations and rewards)"
    )
    assert caution.startswith("a forecast, not a measurement")
    assert "issues/96" in basis


def test_forecast_compares_images_if_steps_have_fewer_images():
    recipe = load("sd3/ocr-grpo", ["tasks_per_step=24", "ranks=16"])
    first, *_, last = forecast_of(recipe, 0.003, "16 x h100").text.splitlines()
    assert "3.0 h to 6.0 h on 16 x h100 (1,000 to 2,000 steps" in first
    assert last == "a step of that run has 1,152 images, one of this recipe 576: images are compared, not steps"


def test_forecast_without_a_target_gives_only_the_time_of_1000_steps():
    text = forecast_of(load("flux2/ocr-grpo"), 0.05, "8 x h100").text
    assert text.startswith("1000 steps take 50.0 h on 8 x h100. How many steps a target takes is not known")
