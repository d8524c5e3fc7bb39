"""Makes dry runs of published models with fewer layers, once at full depth, and twice extrapolated from two smaller depths.

    python dry_run_depths.py FOLDER NAME

Prints a JSON line with the figures of a recipe by stage. "parallel": the two depths ran at the same time.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import retouch_plan.dry_run as parallel
from retouch.models.base import DiffusersModel
from retouch.recipe.recipe import load
from retouch_plan.dry_run import DryRun, dry_run
from retouch_plan.machines import MACHINES
from retouch_plan.models import write_folder, write_single

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("APP__DATA_DIR", "APP__BASE_EXP_DIR", "APP__RUN_NAME", "APP__REWARD_FUNCTION_API_BASE")
SHALLOW: dict[str, dict[str, Any]] = {  # by part
    "transformer": {"num_layers": 7},
    "text_encoder": {"num_hidden_layers": 2, "num_layers": 2},
    "text_encoder_2": {"num_hidden_layers": 2, "num_layers": 2},
    "text_encoder_3": {"num_layers": 2},
    "writer": {"num_hidden_layers": 12},
}
RECIPE_LAYERS: dict[str, dict[str, Any]] = {  # by recipe
    "sd3/ocr-grpo": {"num_layers": 10, "dual_attention_layers": [0, 1, 2, 3, 4]},
    "flux-fill/ip-adapter-grpo": {"num_layers": 6, "num_single_layers": 12},
}


def shallow(config: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with fewer layers."""
    changed = {**config, **{key: value for key, value in layers.items() if key in config}}
    for part in ("text_config", "vision_config"):
        if part in config:
            fewer = {"depth": 2, "fullatt_block_indexes": [1]} if part == "vision_config" else layers
            changed[part] = shallow(config[part], fewer)
    return changed


def figures(found: DryRun) -> dict[str, dict[str, float]]:
    """Return the figures by which two dry runs are compared, for each stage."""
    return {
        "peaks": {name: stage.peak for name, stage in found.stages.items()},
        "flops": {name: sum(stage.work.flops.values()) for name, stage in found.stages.items()},
        "kernels": {name: stage.work.counts["kernels"] for name, stage in found.stages.items()},
        "waits": {name: sum(stage.work.waits.values()) for name, stage in found.stages.items()},
        "seconds": {name: stage.work.seconds.total() for name, stage in found.stages.items()},
        "whole": {"checkpoint": found.checkpoint, **{name: work.counts["kernels"] for name, work in found.units.items()}},
    }


def main(folder: Path, name: str) -> None:
    os.environ.update(dict.fromkeys(VARIABLES, "http://localhost"))
    recipe = load(ROOT / "recipes" / f"{name}.jsonnet", ["ranks=2"])
    key, model = "policy.model", recipe.policy.model
    if isinstance(model, DiffusersModel):
        described = {part: dict(each) for part, each in (model.published() or {}).items()}
        for part, each in described.items():
            layers = {**SHALLOW.get(part, {}), **(RECIPE_LAYERS.get(name, {}) if part == "transformer" else {})}
            each["config"] = shallow(each["config"], layers)
        write_folder(folder, described)
    else:
        (writer,) = [each for part, each in (model.describe(None) or {}).items() if part == "writer"]
        write_single(folder, {**writer, "config": shallow(writer["config"], SHALLOW["writer"])})
    changed = load(ROOT / "recipes" / f"{name}.jsonnet", ["ranks=2", f"{key}.path={folder}"])
    machine = MACHINES["h100"]
    with patch.object(parallel._log, "warning", side_effect=AssertionError("the second process failed")):
        at_once = figures(dry_run(changed, machine, processes=2))
    line = {
        "parallel": at_once,
        "two": figures(dry_run(changed, machine)),
        "full": figures(dry_run(changed, machine, full_depth=True)),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main(Path(sys.argv[1]), sys.argv[2])
