"""docs/machines.md shows the stored rehearsals; every recipe is rehearsed again, and memory plans are compared with them."""

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from retouch.doctor import memory
from retouch.doctor.device import GPUS, PlannedDevice
from retouch.doctor.memory import check_memory, describe, footprint
from retouch.doctor.writer_memory import check_writer_memory, device_plans
from retouch.memory.plan import FREE_SHARE, PLAN_ERROR, fits
from retouch.memory.sizes import stored_count
from retouch.models import base, language
from retouch.models.emu3 import family as emu3
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, load
from retouch.rehearsal.inputs import WORDS
from retouch.rehearsal.machines import MACHINES, find_machine
from slow_params import slow_except
from warm_python import python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "rehearsal" / "table.py"
KEPT: dict[str, dict[str, Any]] = json.loads((SCRIPT.parent / "rehearsed.json").read_text(encoding="utf-8"))
CHECKED = ("sd3/ocr-grpo", "flux-kontext/photos", "qwen-image-edit/writer-grpo", "qwen-image-2/flow-grpo")
"""The recipes that `make test` plans: one of each family whose rehearsal is quick."""
TABLE = runpy.run_path(str(SCRIPT))
SHARED = ("qwen-image-edit/writer-grpo-frozen",)
"""The rehearsal takes the editor's text encoder and the writer to have the same weights, which are held once; a plan does not."""


def test_the_machines_page_contains_the_stored_rehearsal_tables() -> None:
    assert TABLE["tables"](KEPT) in (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")


def test_every_full_size_recipe_is_in_the_table() -> None:
    shown = [each for name, row in KEPT.items() for each in (name, *row["same"])]
    assert sorted(shown) == sorted(TABLE["names"]())


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("name", KEPT)
def test_the_kept_figures_are_for_the_present_recipe(name: str) -> None:
    assert KEPT[name]["digest"] == TABLE["digest"](name)


@pytest.mark.parametrize("name", KEPT)
def test_every_recipe_fits_the_machine_that_it_names(name: str) -> None:
    row = KEPT[name]
    assert row["machine"] == TABLE["machine_of"](name)
    assert row["peak"] <= (1 - FREE_SHARE) * MACHINES[row["machine"]].memory


def plans_of(recipe: Recipe) -> list[int]:
    """The planned peak of each device."""
    described, model = describe(recipe, None), recipe.policy.model
    assert described is not None
    if isinstance(recipe.policy, DenoisingPolicyKeys):
        return [footprint(recipe, described).plan.total]
    writer = (described if recipe.image_model is model else model.describe(None))["writer"]
    return [each.plan.total for each in device_plans(recipe, writer, described)]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in TABLE["VARIABLES"].items():
        monkeypatch.setenv(variable, value)


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("name", slow_except(CHECKED, KEPT))
def test_the_peak_of_a_plan_is_within_3_percent_of_the_rehearsed_peak(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (base, language, emu3, memory):  # a plan assumes longer instructions than a rehearsal
        monkeypatch.setattr(module, "INSTRUCTION_TOKENS", WORDS)
    recipe = load(ROOT / "recipes" / f"{name}.jsonnet")
    planned = max(plans_of(recipe))
    if name in SHARED:
        planned -= 2 * stored_count(describe(recipe, None)["text_encoder"])
    assert planned == pytest.approx(KEPT[name]["peak"], rel=PLAN_ERROR)


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("name", slow_except(CHECKED, KEPT))
def test_no_recipe_is_planned_to_fit_a_gpu_on_which_its_rehearsal_does_not_fit(name: str) -> None:
    recipe = load(ROOT / "recipes" / f"{name}.jsonnet")
    check = check_memory if isinstance(recipe.policy, DenoisingPolicyKeys) else check_writer_memory
    least = int(KEPT[name]["peak"] / (1 - FREE_SHARE))
    for size in (*GPUS.values(), least - 1):
        found = check(recipe, None, PlannedDevice("card", size, None))[0]
        findings = found if isinstance(found, list) else [found]
        planned = [each.status for each in findings if "headroom on card" in each.text]
        assert planned
        assert fits(KEPT[name]["peak"], size) or set(planned) != {"ok"}, findings


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_a_new_rehearsal_of_a_recipe_matches_the_table(name: str) -> None:
    code = f"import json, runpy; print(json.dumps(runpy.run_path({str(SCRIPT)!r})['rehearse_one']({name!r})))"
    done = subprocess.run([python(), "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    found, kept = json.loads(done.stdout.splitlines()[-1]), KEPT[name]
    assert found["in"] == kept["in"]
    assert found["peaks"] == pytest.approx(kept["peaks"], rel=0.01)
    assert found["flops"] == pytest.approx(kept["flops"], rel=0.01)
    assert found["hours"] == pytest.approx(kept["hours"], rel=0.02)


def test_a_profile_replaces_rates(tmp_path: Path) -> None:
    profile = tmp_path / "mine.json"
    profile.write_text(json.dumps({"name": "h200", "half": 7e14}))
    made = find_machine(str(profile))
    assert (made.half, made.bandwidth) == (7e14, MACHINES["h200"].bandwidth)
    assert made.measured == "measured, mine.json"


@pytest.mark.parametrize("content", ['{"name": "h300"}', '{"half": 1}', '{"name": "h100", "speed": 1}', "[]"])
def test_a_wrong_profile_is_refused(tmp_path: Path, content: str) -> None:
    profile = tmp_path / "wrong.json"
    profile.write_text(content)
    with pytest.raises(ValueError, match="a profile has a name"):
        find_machine(str(profile))


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of h200, h100"):
        find_machine("abacus")
