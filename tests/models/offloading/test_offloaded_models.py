"""Parts of a denoising policy in CPU memory: they give the same images, and are on the device only while they are used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_recipes
from image_levels import ROUNDING, max_level_difference
from retouch.recipe.derived_facts import differences
from retouch.recipe.recipe import parse
from retouch.run.session import run
from retouch_plan.checks import check_prompt_embeddings
from warm_python import python

SUPPORT = Path(__file__).parents[2] / "support"
CACHED = {"policy": {**tiny_recipes.SMALL["policy"], "prompt_embeddings": "cached"}}
OFFLOADED = {"devices": {"offload": True}}
WAYS: dict[str, dict[str, Any]] = {"live": {}, "cached": CACHED, "offloaded": OFFLOADED, "both": {**CACHED, **OFFLOADED}}


@pytest.fixture(autouse=True)
def prompt_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prompt embeddings."""
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE", str(tmp_path / "prompts"))
    return tmp_path / "prompts"


def small(folder: Path, way: str, **changes: Any) -> dict[str, Any]:
    recipe = {**tiny_recipes.SMALL, "out": str(folder), "device": "cpu", "trackers": []}
    # One task per step, so that a batch is one prompt, which is how the cache encodes prompts.
    recipe |= {"tasks_per_step": 1, "group_size": 4, "data": {"kind": "playground", "complexity": [1], "count": 4}}
    recipe |= {"eval": {"tasks": 1}, "rollout": {**tiny_recipes.SMALL["rollout"], "guidance_scale": 2.0}}
    return {**recipe, **WAYS[way], **changes}


def step(tmp_path: Path, way: str, device: str) -> dict[str, Any]:
    """Two rollouts of one step and its loss, in a process of its own."""
    file = tmp_path / f"{way}.json"
    file.write_text(json.dumps({key: value for key, value in small(tmp_path, way).items() if key not in ("devices", "device")}))
    command = [python(), str(SUPPORT / "placed_denoising.py"), str(file), device, str("devices" in WAYS[way]).lower()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    found: dict[str, Any] = json.loads(made.stdout)
    return found


@pytest.fixture(scope="module")
def cpu_step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The step with all parts on the CPU."""
    return step(tmp_path_factory.mktemp("cpu_step"), "live", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cached", "offloaded"])
def test_frozen_parts_are_on_the_device_only_while_they_are_used(cpu_step: dict[str, Any], tmp_path: Path, way: str) -> None:
    there = step(tmp_path, way, "pretend:0")
    assert max_level_difference(there["images"], cpu_step["images"]) <= ROUNDING
    assert there["loss"] == pytest.approx(cpu_step["loss"], abs=1e-6)
    assert there["used"] == {part: ["pretend:0"] for part in ("transformer", "text encoder", "autoencoder")}
    waits = {"transformer": ["pretend:0"], "text encoder": ["cpu"], "autoencoder": ["pretend:0" if way == "cached" else "cpu"]}
    assert there["waits"] == waits
    assert all(there["calls"]) if way == "offloaded" else (there["calls"][0] > 0 and there["calls"][1] == 0)


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "small" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


@pytest.mark.slow
def test_cached_and_offloaded_runs_give_bitwise_equal_metrics(tmp_path: Path, prompt_cache: Path) -> None:
    found = {}
    for name, way in [("live", "live"), ("cold", "cached"), ("warm", "both")]:
        assert run(parse(small(tmp_path / name, way)), fresh=False) == 0
        found[name] = metrics(tmp_path / name)
        assert len(found[name]) == 2
    assert len(list(prompt_cache.iterdir())) > 2
    assert all(each == found["live"] for each in found.values())


def test_cache_and_offload_settings_do_not_count_as_recipe_differences(tmp_path: Path) -> None:
    recipes = [parse(small(tmp_path, way)) for way in WAYS]
    assert [differences(recipes[0], other) for other in recipes] == [[]] * 4
    assert "prompt_embeddings" not in json.dumps(recipes[0].document())


@pytest.mark.parametrize("way", ["cached", "offloaded"])
def test_imported_model_with_cached_prompts_or_offloading_raises(way: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(small(tmp_path, way)))
    document["policy"]["model"] = {"kind": "import", "class": "tiny_models:Anything"}
    key = "policy.prompt_embeddings" if way == "cached" else "devices.offload"
    with pytest.raises(ValueError, match=f"{key}: .*only for models in the layout of a diffusers pipeline"):
        parse(document)


def test_doctor_reports_the_kept_embeddings(tmp_path: Path, prompt_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_prompt_embeddings(parse(small(tmp_path, "live")))) == []
    (found,) = check_prompt_embeddings(parse(small(tmp_path, "cached")))
    assert f"0 stored prompt embeddings, 0.00 GB of at most 100.00 GB, in {prompt_cache}" in found.text
    prompt_cache.mkdir()
    (prompt_cache / "one.safetensors").write_bytes(bytes(2 * 10**7))
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE_GB", "1e9")
    (found,) = check_prompt_embeddings(parse(small(tmp_path, "cached")))
    assert "1 stored prompt embeddings, 0.02 GB of at most" in found.text
    assert "are free there, less than the embeddings may take" in found.text
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE_GB", "none")
    (found,) = check_prompt_embeddings(parse(small(tmp_path, "cached")))
    assert (found.status, found.fix) == ("FAILED", "export RETOUCH_PROMPT_CACHE_GB=100")
