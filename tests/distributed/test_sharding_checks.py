"""Sharding settings of accelerate: the shipped configurations start sharded ranks, and others are rejected with the reason."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_writer_runs
from retouch.config.packaged import packaged_recipes
from retouch.distributed.launching import rank_environments
from retouch.distributed.ranks import check_sharding
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch_plan.checks import check_sharding_settings
from tiny_recipes import SMALL

SUPPORT = Path(__file__).parents[1] / "support"
NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}


def sharded(sharding: str | None) -> Recipe:
    return parse({**SMALL, "sharding": sharding})


@pytest.mark.parametrize(
    ("sharding", "environment"),
    [
        (None, {}),
        ("fsdp2", {"WORLD_SIZE": "2"}),
        ("fsdp2", {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}),
        ("zero2", {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}),
        (None, {"ACCELERATE_USE_DEEPSPEED": "false"}),
    ],
)
def test_launcher_settings_that_match_the_recipe_are_accepted(sharding: str | None, environment: dict[str, str]) -> None:
    check_sharding(sharded(sharding), environment)


@pytest.mark.parametrize(
    ("sharding", "environment", "why"),
    [
        ("zero2", {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, r"zero_stage 3: .*pop from an empty deque.*zero2\.yaml"),
        (None, {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, r"has sharding zero2, but the recipe has none"),
        ("fsdp2", {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, r"or launch with recipes/accelerate/fsdp2\.yaml"),
        ("zero2", {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_stage 1; only 2 is supported"),
        ("zero2", {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "a DeepSpeed file, which is ignored"),
        (
            "zero2",
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            "offloads DeepSpeed's optimizer",
        ),
        ("fsdp2", {**FSDP, "FSDP_VERSION": "1"}, "fsdp_version 1; only 2 is supported"),
        (
            "fsdp2",
            {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            r"offloads FSDP's parameters.*devices\.weights=cpu",
        ),
        ("zero2", {**FSDP, "FSDP_VERSION": "2"}, "has sharding fsdp2, but the recipe has zero2"),
    ],
)
def test_unsupported_or_conflicting_launcher_settings_raise(sharding: str | None, environment: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_sharding(sharded(sharding), environment)


def test_weights_in_cpu_memory_require_several_sharded_ranks() -> None:
    recipe = parse({**SMALL, "sharding": "fsdp2", "devices": {"weights": "cpu"}})
    offloads = {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true", "WORLD_SIZE": "2"}
    check_sharding(recipe, offloads)
    check_sharding(recipe, {**offloads, "FSDP_OFFLOAD_PARAMS": "false"})
    with pytest.raises(ValueError, match=r"devices\.weights: a single rank does not shard weights"):
        check_sharding(recipe, {})
    (found,) = check_sharding_settings(recipe, world=1)
    assert (found.status, found.fix) == ("FAILED", "--set devices.weights=null")


def test_missing_deepspeed_is_reported_only_if_several_ranks_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = sharded("zero2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_sharding(recipe, {})  # a single rank shards nothing
    (found,) = check_sharding_settings(recipe, world=2)
    assert (found.status, found.fix) == ("FAILED", "pip install 'retouch[deepspeed]'")
    (alone,) = check_sharding_settings(recipe, world=1)
    assert (alone.status, alone.text) == ("ok", "a single rank shards nothing")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("zero2", marks=NO_DEEPSPEED), "fsdp2"])
def test_shipped_accelerate_configurations_start_sharded_ranks(tmp_path: Path, sharding: str) -> None:
    tiny_writer_runs.save_writer(tmp_path / "writer")
    document = tiny_writer_runs.recipe(tmp_path, tmp_path / "writer", steps=1, sharding=sharding, eval={"tasks": 2}, ranks=2)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu"}
    port = rank_environments(2)[0]["MASTER_PORT"]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(packaged_recipes() / "accelerate" / f"{sharding}.yaml")]
    command += ["--num_processes", "2", "--main_process_port", port, "-m", "retouch.cli", "train", str(file)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    folder = RunFolder(tmp_path / "written")
    assert f"2 ranks with {sharding}" in folder.log(0).read_text()
    timings = json.loads(folder.timings.read_text().splitlines()[0])
    assert {"memory/peak_gb/rank-0", "memory/peak_gb/rank-1"} <= timings.keys()
    assert folder.summary.exists()
