"""Runs the checks of `make gpu` with tiny models on the fake accelerator of dry runs, in a process of its own.

    python gpu_on_fake.py FOLDER

Prints a JSON line for each check: its name, the number of values, and the error if there was one. The values are meaningless; an
operation on tensors of two devices is an error, as on a GPU.
"""

import importlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from retouch_plan.accelerator import DEVICE, Accelerator, fused_attention, register
from retouch_plan.dry_run import ERRORS, error_line

GPU = Path(__file__).parents[2] / "measurements" / "gpu"
CHECKS = {
    "environment:run": None,
    "parity:run": None,
    "steps:sd3": None,
    "ratios:sd3": None,
    "loops:run": 4,  # the other loop needs autocast, which a fake device does not have
    "steps:qwen": None,
    "steps:qwen_image": None,
    "steps:qwen_image_2": None,
    "ratios:qwen": None,
    "writer:run": None,
}
"""The checks that run in a single process, with the number of their first values to compute (None: all)."""


def main(folder: Path) -> None:
    sys.path.insert(0, str(GPU))
    register()
    target_class: Any = importlib.import_module("target").Target
    for check, count in CHECKS.items():
        module, _, function = check.partition(":")
        run = getattr(importlib.import_module(module), function)
        scratch = folder / check.replace(":", "-")
        scratch.mkdir()
        target = target_class(torch.device(DEVICE, 0), tiny=True, folder=folder, scratch=scratch)
        line: dict[str, Any] = {"check": check, "values": 0}
        with Accelerator(), fused_attention():
            try:
                for _ in islice(run(target), count):
                    line["values"] += 1
            except ERRORS as error:
                line["error"] = error_line(error)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
