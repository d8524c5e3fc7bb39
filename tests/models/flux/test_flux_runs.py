"""Runs of a warm-up and then RL, on triplets and on the playground."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_flux_runs
from retouch import cli
from retouch.recipe.recipe import parse
from retouch.run.session import run
from tiny_recipes import SMALL

TINY = "recipes/flux-fill/tiny.jsonnet"


def tiny_run(root: Path, name: str, *, warm_up: int, rl: int) -> tuple[Path, str]:
    """Run the tiny recipe on a folder with one valid and one invalid item; return the folder of the run and the text of its log."""
    data = tiny_flux_runs.make_triplets(root / "items", {11: "Azir", 17: "Baby"})
    (data / "test17_ref.png").unlink()
    changes = {"data.path": data, "data.allow_test_sets": "true", "out": root / "runs", "name": name, "trackers": "[]"}
    changes |= {"phases.0.steps": warm_up, "phases.1.steps": rl, "phases.0.tasks_per_step": 1}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert cli.main(["train", TINY, *words]) == 0
    folder = root / "runs" / name
    return folder, (folder / "train.log").read_text()


@pytest.mark.slow
def test_tiny_recipe_trains_on_the_valid_item_and_reports_the_invalid_one(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr")
    folder, log = tiny_run(tmp_path, "whole", warm_up=1, rl=1)
    for once in ("self_bench.txt:2: error: 'test17_ref.png': no such file", "skipped 1 of 2 rows"):
        assert log.count(once) == 1, once
    assert "measures fit, not generalisation" in log
    assert "trained-on tasks after step 2" in log
    assert "held-out" not in log
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["warm-up", "rl"]
    assert lines[1]["policy/ratio_max_first"] <= 1e-6 < lines[1]["policy/ratio_max"]  # two inner passes
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["on"]) == (2, "1 trained-on task")
    page = re.sub(r"<script.*?</script>", "", (folder / "report.html").read_text(), flags=re.DOTALL)
    assert "<h2>Trained-on scores</h2>" in page
    assert "measure fit, not generalisation" in page
    assert "eld-out" not in page


@pytest.mark.slow
def test_phase_with_zero_steps_is_skipped_and_can_be_added_later(tmp_path: Path) -> None:
    def trained(name: str, warm_up: int, rl: int) -> tuple[dict[str, torch.Tensor], str]:
        phases = [{"name": "warm-up", "steps": warm_up, "objective": {"kind": "supervised"}}, {"name": "rl", "steps": rl}]
        quiet = {"out": str(tmp_path), "name": name, "trackers": [], "eval": {"tasks": 1, "every": 0}}
        recipe = parse({**SMALL, **quiet, "steps": None, "phases": phases})
        assert run(recipe, fresh=False) == 0
        newest = recipe.folder / "checkpoints" / f"step-{warm_up + rl:06d}" / "weights.safetensors"
        return load_file(newest), (recipe.folder / "train.log").read_text()

    wanted, _ = trained("whole", 1, 1)
    _, log = trained("parts", 1, 0)
    assert "phase warm-up: steps 1 to 1" in log
    assert "phase rl" not in log
    found, _ = trained("parts", 1, 1)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    _, log = trained("rl", 0, 1)
    assert "phase warm-up" not in log
    assert "phase rl: steps 1 to 1" in log
