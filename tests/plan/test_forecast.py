"""The forecast of `retouch doctor --estimate`: which target applies to a recipe, and the calculation of its hours."""

from collections import Counter
from types import SimpleNamespace

import pytest

from retouch.recipe.recipe import load
from retouch_plan.dry_run import DryPhase, hours
from retouch_plan.estimate import TARGETS, forecast_of
from retouch_plan.fitting import within_a_day
from retouch_plan.machines import find_machine
from retouch_plan.meter import Stage, Work

OTHERS = ("playground/nft", "flux2-klein/ocr-grpo", "sd3/prompt-enhancer")
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
    text = forecast_of(load("flux2-klein/ocr-grpo"), 0.05, "8 x h100").text
    assert text.startswith("1000 steps take 50.0 h on 8 x h100. How many steps a target takes is not known")


@pytest.mark.parametrize(
    ("name", "overrides", "a_row", "fewer"),
    [
        ("sd3/ocr-grpo", ["ranks=1", "steps=200"], 1.0, {"tasks_per_step": 18}),
        ("sd3/ocr-grpo", ["ranks=1"], 1.0, {"tasks_per_step": 6, "group_size": 12}),
        ("sd3/ocr-grpo", ["ranks=1"], 8.0, {"tasks_per_step": 2, "group_size": 12, "steps": 449}),
        ("sd3/ocr-grpo", ["ranks=1"], 0.05, {}),
        ("qwen-image-edit/flow-grpo", ["ranks=2", "tasks_per_step=16"], 1.0, {"tasks_per_step": 8}),
        ("emu3/sft_sc2stage", [], 100.0, {}),
    ],
)
def test_a_run_of_more_than_a_day_is_told_the_tasks_groups_and_steps_with_which_it_ends_within_one(name, overrides, a_row, fewer):
    """The seconds of a step are those of a row times the rows."""
    machine = find_machine("h100")

    def planned(changes):
        recipe = load(name, [*overrides, *(f"{key}={value}" for key, value in changes.items())])
        rows = recipe.tasks_per_step * recipe.group_size // recipe.ranks
        stage = Stage(Work(seconds=Counter({"matmul": a_row * rows})))
        phase = DryPhase(name="main", steps=recipe.steps or 1, rows=rows, stages=("rollout",))
        return recipe, SimpleNamespace(stages={"rollout": stage}, world=recipe.ranks, phases=(phase,), evaluations=0)

    assert within_a_day(*planned({}), machine) == fewer
    recipe, found = planned(fewer)
    assert recipe.phases is not None or hours(found, machine) <= 24
