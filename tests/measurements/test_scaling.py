"""The scaling page: its fits on known curves, points that differ in one setting, and runs that are made once."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retouch.core import intervals
from retouch_plan.estimate import TARGETS

FOLDER = Path(__file__).parents[2] / "measurements" / "league"
MODULES = ("budget", "contestants", "league_curves", "league_page", "noisy_judges", "ranking", "runs", "worlds")
OWN = ("scaling_fit", "scaling_points", "scaling_page", "scaling")


@pytest.fixture(autouse=True)
def _intervals_of_few_tasks(monkeypatch):
    monkeypatch.setattr(intervals, "FEWEST", 2)  # the runs of these tests have three tasks


@pytest.fixture(scope="module")
def league():
    """The modules of the page."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in (*MODULES, *OWN)})
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*MODULES, *OWN):
            sys.modules.pop(name, None)


# Fits


def test_each_curve_family_fits_and_extrapolates_its_own_data_without_the_last_point(league):
    fits, n = league.scaling_fit, np.array([100.0, 200, 400, 800, 1600])
    curves = {"logarithm": -0.5 + 0.1 * np.log(n), "power law": 0.02 * n**0.3, "hyperbola": 0.6 * n / (n + 251.188643)}
    for form in fits.FORMS:
        found = fits.extrapolated(form, n, curves[form.name])
        assert found.residual == pytest.approx(0, abs=1e-6)
        assert found.predicted == pytest.approx(found.measured, abs=1e-6)
        assert fits.chosen(n, curves[form.name]) is form
    rising = fits.fit(fits.LOGARITHM, n, curves["logarithm"])
    assert rising.parameters == pytest.approx((-0.5, 0.1))
    assert fits.fit(fits.POWER, n, curves["power law"]).parameters == pytest.approx((0.02, 0.3))
    assert rising.samples_for(0.25) == pytest.approx(np.exp(7.5), rel=0.01)
    assert fits.fit(fits.LOGARITHM, n, -0.1 * np.log(n)).samples_for(0.25) == np.inf
    curves["logarithm"][-1] = 5.0
    assert fits.chosen(n, curves["logarithm"]) is fits.LOGARITHM
    assert fits.extrapolated(fits.LOGARITHM, n, curves["logarithm"]).predicted == pytest.approx(-0.5 + 0.1 * np.log(1600))


# Points


def test_every_point_changes_one_setting_and_uses_the_same_budget(league):
    allowed = {
        "Samples": set(), "Group size": {"tasks_per_step", "group_size"}, "Denoising steps trained per chain": {"rollout"},
        "Noise of the judge": {"reward"}, "Network size": {"policy"},
    }  # fmt: skip

    def recipe(point):
        return league.worlds.recipe_of(point.world, point.contestant, point.settings, stage="final", seed=7, curve=1)

    base = recipe(league.scaling_points.BASE)
    for axis in league.scaling_points.AXES:
        assert axis.base in [point.label for point in axis.points]
        for point in axis.points:
            made = recipe(point)
            spent = league.budget.spent(made, made.steps)
            assert 0.9 * point.world.budget <= spent <= point.world.budget
            assert point.world.budget == league.worlds.EDITOR.budget or axis.title == "Samples"
            assert made.tasks_per_step * made.group_size == 48
            assert made.eval_data().split == "test"
            first, other = base.document(), made.document()
            differing = {key for key in first.keys() | other.keys() if first.get(key) != other.get(key)}
            assert differing - {"steps", "eval"} <= allowed[axis.title], point.contestant.name


# Runs


def record(share, seed):
    """A finished run on two strata of two tasks."""
    after = [4.0 + 6 * share] * 4
    base = {
        "ended": "finished", "tasks": [2, 2], "before": [4.0] * 4, "ceiling": 10.0, "after": after,
        "curve": [[0, 4], [1, after[0]]],
    }  # fmt: skip
    return {**base, "steps": 5, "images": 240, "cpu_seconds": 20.0, "seed": seed}


def test_every_point_is_run_once_with_each_seed(league, tmp_path):
    made: list[Any] = []

    def train(recipe, folder, *, world):
        made.append(recipe)
        return {key: value for key, value in record(0.1, 0).items() if key != "seed"}

    points = league.scaling_points.every_point()[:3]
    places = {"folder": tmp_path / "runs", "kept": tmp_path / "kept"}
    assert league.scaling.work(points, 2, **places, train=train) == 6
    assert [recipe.seed for recipe in made] == [101] * 3 + [102] * 3
    assert league.scaling.work(points, 2, **places, train=train) == 0
    assert league.scaling.work(points, 3, **places, train=train, until=0.0) == 0
    assert [[run["seed"] for run in point.records(tmp_path / "kept")] for point in points] == [[101, 102]] * 3


# The page


def test_the_page_matches_the_stored_runs(league):
    page, kept = league.scaling_page, FOLDER / "kept"
    assert page.PAGE.read_text(encoding="utf-8") == page.page(kept)
    assert page.PICTURE.read_text(encoding="utf-8") == page.figure(kept)


def test_the_playground_forecast_equals_the_interval_on_the_page(league):
    found = re.search(r"0\.25 of the gap takes [\d,]+ images \(([\d,]+) to ([\d,]+)\)", league.scaling_page.PAGE.read_text())
    (target,) = (each for each in TARGETS if "docs/scaling.md" in each.basis)
    assert target.images == tuple(float(number.replace(",", "")) for number in found.groups())


def test_a_table_has_means_over_seeds_and_differences_to_its_base(league, tmp_path):
    for point, share in zip(league.scaling_points.GROUPS.points, (0.1, 0.2, 0.3, 0.4), strict=True):
        about = {"stage": "final", "settings": point.settings}
        runs = {str(seed): {**record(share + 0.01 * seed, seed), **about} for seed in (0, 2)}
        league.runs.keep(tmp_path, point.world, point.contestant.name, runs)
    rows = [line.split(" | ") for line in league.scaling_page.table(league.scaling_points.GROUPS, tmp_path)][2:]
    assert [row[0] for row in rows] == ["| 2", "| 4", "| 8", "| 16"]
    assert [row[3][:4] for row in rows] == ["0.11", "0.21", "0.31", "0.41"]
    assert [row[4][:5] for row in rows] == ["-0.20", "-0.10", "", "0.10 "]
    assert rows[0][5] == "0.10, 0.12"
