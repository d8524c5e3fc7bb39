"""Blocks and activations that wait in CPU memory: a run has the same bits, also after resuming."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_recipes
from retouch.recipe.recipe import parse
from retouch.run.session import run

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {"devices": {"swap_blocks": 2}},
    "all blocks": {"devices": {"swap_blocks": 4}},
    "activations": {"policy": {"gradient_checkpointing": "cpu"}},
    "both": {"devices": {"swap_blocks": 2, "offload": True}, "policy": {"gradient_checkpointing": "cpu"}},
}


def small(folder: Path, way: str, *, steps: int = 2, **policy: Any) -> dict[str, Any]:
    changes = WAYS[way]
    keys = {**tiny_recipes.SMALL["policy"], "gradient_checkpointing": True, **changes.get("policy", {}), **policy}
    made = {**tiny_recipes.SMALL, "out": str(folder), "device": "cpu", "trackers": [], "steps": steps, "policy": keys}
    return made | ({"devices": changes["devices"]} if "devices" in changes else {})


def result(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "small" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("plain")
    assert run(parse(small(folder, "none")), fresh=False) == 0
    return result(folder)


@pytest.mark.parametrize("way", ["blocks", "all blocks", "activations", "both"])
def test_a_run_has_the_same_bits_if_blocks_or_activations_wait_in_cpu_memory(tmp_path: Path, way: str, plain: list[Any]) -> None:
    assert run(parse(small(tmp_path, way, steps=1)), fresh=False) == 0
    assert run(parse(small(tmp_path, way)), fresh=False) == 0  # resumed
    assert result(tmp_path) == plain
