"""docs/machines.md shows the stored dry runs; and a dry run of every recipe gives them again."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from retouch_plan.machines import FREE_SHARE, MACHINES, find_machine
from warm_python import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "measurements" / "rehearsal" / "table.py"
KEPT: dict[str, dict[str, Any]] = json.loads((SCRIPT.parent / "rehearsed.json").read_text(encoding="utf-8"))
TABLE = runpy.run_path(str(SCRIPT))


def test_the_machines_page_contains_the_stored_dry_run_tables():
    assert TABLE["tables"](KEPT) in (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")


def test_every_full_size_recipe_is_in_the_table():
    shown = [each for name, row in KEPT.items() for each in (name, *row["same"])]
    assert sorted(shown) == sorted(TABLE["names"]())


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("name", KEPT)
def test_the_kept_figures_are_for_the_present_recipe(name):
    assert KEPT[name]["digest"] == TABLE["digest"](name)


@pytest.mark.parametrize("name", KEPT)
def test_every_recipe_fits_the_machine_that_it_names(name):
    row = KEPT[name]
    assert row["machine"] == TABLE["machine_of"](name)
    assert row["peak"] <= (1 - FREE_SHARE) * MACHINES[row["machine"]].memory


@pytest.fixture
def variables(monkeypatch):
    for variable, value in TABLE["VARIABLES"].items():
        monkeypatch.setenv(variable, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_a_new_dry_run_of_a_recipe_matches_the_table(name):
    code = f"import json, runpy; print(json.dumps(runpy.run_path({str(SCRIPT)!r})['rehearse_one']({name!r})))"
    printed = run_python("-c", code, timeout=1800)
    found, kept = json.loads(printed.splitlines()[-1]), KEPT[name]
    assert found["in"] == kept["in"]
    assert found["peaks"] == pytest.approx(kept["peaks"], rel=0.01)
    assert found["flops"] == pytest.approx(kept["flops"], rel=0.01)
    assert found["hours"] == pytest.approx(kept["hours"], rel=0.02)


def test_a_profile_replaces_rates(tmp_path):
    profile = tmp_path / "mine.json"
    profile.write_text(json.dumps({"name": "h200", "half": 7e14}))
    made = find_machine(str(profile))
    assert (made.half, made.bandwidth) == (7e14, MACHINES["h200"].bandwidth)
    assert made.measured == "measured, mine.json"


@pytest.mark.parametrize("content", ['{"name": "h300"}', '{"half": 1}', '{"name": "h100", "speed": 1}', "[]"])
def test_a_wrong_profile_is_refused(tmp_path, content):
    profile = tmp_path / "wrong.json"
    profile.write_text(content)
    with pytest.raises(ValueError, match="a profile has a name"):
        find_machine(str(profile))


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="use one of h200, h100"):
        find_machine("abacus")
