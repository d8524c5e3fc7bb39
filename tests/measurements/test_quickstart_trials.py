"""The trials behind docs/quickstart-trials.md: each is a valid recipe, none saw a test task, and the page has all of them."""

import importlib
import shlex
import sys
from pathlib import Path

import pytest

from retouch.recipe.recipe import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trials():
    """``measurements/league/quickstart_trials.py``."""
    folder = str(ROOT / "measurements" / "league")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("quickstart_trials")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("quickstart_trials", None)


def test_every_trial_is_a_recipe_on_validation_tasks_with_a_seed_for_tuning(trials):
    for trial in trials.read():
        words = shlex.split(trials.command(trial))
        assert words[:3] == ["retouch", "train", "recipes/playground/grpo.jsonnet"]
        assert words[4::2] == trials.overrides(trial)
        recipe = load(words[2], words[4::2])
        assert recipe.eval.split == "validation"
        assert recipe.seed >= 100
        assert trial["points"][-1]["step"] == trial["steps"] <= recipe.steps


def test_the_page_has_the_table_of_all_trials(trials):
    table = trials.table()
    assert table in (ROOT / "docs" / "quickstart-trials.md").read_text(encoding="utf-8")
    assert table.count("\n") >= len(trials.read())
