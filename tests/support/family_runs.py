"""Recipes of a few small steps for whole runs of a family of image models, and what such runs leave."""

import json
from pathlib import Path
from typing import Any

import tiny_flux_runs
import tiny_models


def recipe_of(model: dict[str, Any], root: Path, **changes: Any) -> dict[str, Any]:
    """A run on three prompts."""
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle on a green square\nblue\ngreen\n")
    made = tiny_flux_runs.small(model, prompts, root / "runs")
    return made | {"data": {"kind": "prompts", "path": str(prompts), "held_out": 1}} | changes


def edits_of(root: Path) -> Path:
    """A folder of three images, each with an instruction."""
    folder = root / "photos"
    folder.mkdir()
    for number in range(3):
        tiny_models.picture(number, 64, 64).save(folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "instruction": "make it red"} for number in range(3)]
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def described(module: Any) -> dict[str, Any]:
    """The module as a plan of memory reads it."""
    return {"class": type(module).__name__, "config": {key: value for key, value in module.config.items() if key[0] != "_"}}


def lines_of(recipe: Any) -> list[dict[str, Any]]:
    """The run's metrics."""
    return [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
