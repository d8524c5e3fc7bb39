"""Makes dry runs of a tiny Stable Diffusion 3 with deliberate errors in its adapter, in a separate process.

    python planted_faults.py FOLDER [FAULT ...]

Prints a JSON line per fault: its name, and either the error with its place, or the memory peaks in bytes by stage and the tensors
of the largest peak.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import tiny_pipelines
from retouch.recipe.recipe import parse
from retouch_models.sd3 import SD3Model
from retouch_models.sd3.model import SD3
from retouch_plan.dry_run import dry_run, error_line, fits
from retouch_plan.fitting import smallest_changes
from retouch_plan.machines import FREE_SHARE, MACHINES

EXTRA_BYTES = 2**30


class FaultyAdapter(SD3):
    fault: ClassVar[str] = ""
    kept: ClassVar[list[Tensor]] = []

    def velocity(self, module: Any, x: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        if FaultyAdapter.fault == "device":
            x = x + torch.ones(x.shape[-1])  # fault: device
        if FaultyAdapter.fault == "dtype":
            x = x @ torch.ones(x.shape[-1], x.shape[-1], dtype=torch.float64, device=x.device)  # fault: dtype
        if FaultyAdapter.fault == "shape":
            x = x.flatten(2).reshape(len(x), -1, 7)  # fault: shape
        if FaultyAdapter.fault == "hog" and torch.is_grad_enabled():
            FaultyAdapter.kept.append(torch.zeros(EXTRA_BYTES // 4, device=x.device))
        return super().velocity(module, x, sigma, conditioning)


FAULTS = ("", "device", "dtype", "shape", "hog", "checkpointing", "small chunks", "ranks", "fsdp2", "zero2", "cached", "offloaded")
TOO_LARGE = {"": 0.95, "small chunks": 0.95, "all weights": 0.96}
"""The cases for which changes are suggested, because the machine has only this share of the memory that they need."""


class FaultyModel(SD3Model):
    adapter = "planted_faults:FaultyAdapter"


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe for the tiny model in the folder."""
    model = {
        "kind": "import",
        "class": "planted_faults:FaultyModel",
        "args": {"path": str(folder), "size": [32, 32], "kind": "sd3"},
    }
    return {
        "name": "faults",
        "steps": 3,
        "tasks_per_step": 4,
        "group_size": 4,
        "learning_rate": 1e-3,
        "microbatch": 4,
        "policy": {"kind": "denoising", "model": model, "train": {"kind": "lora", "rank": 4, "alpha": 8}},
        "rollout": {"num_steps": 4, "transition": {"kind": "cps", "noise_level": 0.8}, "guidance_scale": 3.0, "chunk": 8},
        "data": {"kind": "prompts", "path": "none.txt", "held_out": 2},
        "reward": {"kind": "share", "channel": "red", "combine": {"share": 1}},
        "objective": {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4, "kl": {"kind": "closed", "weight": 0.04}},
        "eval": {"tasks": 4, "batch": 2, "every": 2},
        **changes,
    }


def main(folder: Path, chosen: Sequence[str]) -> None:
    tiny_pipelines.sd3().save_pretrained(folder)
    settings = {
        "checkpointing": ["policy.gradient_checkpointing=true", "eval.every=3"],
        "ranks": ["ranks=4", "eval.every=0"],
        "small chunks": ["rollout.chunk=4"],
        "all weights": [
            *("rollout.chunk=1", "microbatch=1", "eval.batch=1", "policy.gradient_checkpointing=true"),
            'policy.train={"kind": "full"}',
        ],
    }
    settings |= {kind: ["ranks=4", f"sharding={kind}", 'policy.train={"kind": "full"}'] for kind in ("fsdp2", "zero2")}
    settings |= {"fsdp2, waiting": [*settings["fsdp2"], "devices.weights=cpu"]}
    settings |= {"cached": ["policy.prompt_embeddings=cached"], "offloaded": ["devices.offload=true"]}
    for fault in chosen or FAULTS:
        FaultyAdapter.fault = fault
        FaultyAdapter.kept.clear()
        read = parse(recipe(folder), settings.get(fault, []), allow_imports=["planted_faults"])
        line: dict[str, Any] = {"fault": fault}
        try:
            found = dry_run(read, MACHINES["h100"])
        except (RuntimeError, ValueError) as error:
            line["error"] = error_line(error)
        else:
            stages = found.stages
            line["peaks"] = {name: stage.peak for name, stage in stages.items()}
            line["flops"] = {name: sum(stage.work.flops.values()) for name, stage in stages.items()}
            line["waits"] = {name: dict(stage.work.waits) for name, stage in stages.items()}
            line["communicated"] = stages["update"].work.counts["communicated"]
            line["held"] = dict(stages["update"].peaks[0][1])
            line["evaluations"] = found.evaluations
            line["peak"], line["rows"], line["checkpoint"] = found.peak, found.phases[0].rows, found.checkpoint
            if fault in TOO_LARGE:
                small = replace(MACHINES["h100"], memory=int(TOO_LARGE[fault] * line["peak"] / (1 - FREE_SHARE)))
                changes = smallest_changes(read, small, found, world=None, allow_imports=["planted_faults"])
                line["changes"] = changes
                if changes is not None:
                    options = [*settings.get(fault, []), *changes[0]]
                    again = dry_run(parse(recipe(folder), options, allow_imports=["planted_faults"]), small)
                    line["again"] = {"peak": again.peak, "fits": fits(again, small)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    import planted_faults

    planted_faults.main(Path(sys.argv[1]), sys.argv[2:])
