"""Runs two steps without and with ``deterministic``, in a separate process because this key changes torch's global settings.

    python numerics_run.py FOLDER

Prints, as JSON, the metrics of both runs and torch's settings after each run.
"""

import json
import os
import sys
from typing import Any

import torch

from retouch.recipe.document import apply
from retouch.recipe.recipe import parse
from retouch.run.session import run
from tiny_recipes import SMALL


def settings() -> dict[str, Any]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "flash_attention": os.environ.get("FLASH_ATTENTION_DETERMINISTIC"),
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
    }


def main(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"before": settings()}
    for name, chosen in (("plain", "deterministic=false"), ("exact", "deterministic=true")):
        short = ["eval.tasks=1", "samples.tasks=1", "samples.every=0", "trackers=[]", "device=cpu"]
        document = apply(SMALL, [f"name={name}", f"out={folder}", chosen, *short])
        assert run(parse(document), fresh=False) == 0
        with open(f"{folder}/{name}/metrics.jsonl") as file:
            found[name] = {"settings": settings(), "metrics": [json.loads(line) for line in file]}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
