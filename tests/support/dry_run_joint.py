"""Makes dry runs of a writer with an image model that trains, and with the same image model frozen.

    python dry_run_joint.py

Prints for each a JSON line with the FLOPs of the update, the bytes at its peak by what they are, and the bytes of a checkpoint.
"""

import json
import sys

from retouch.recipe.recipe import load
from retouch_plan.dry_run import dry_run
from retouch_plan.machines import MACHINES

SMALL = ["tasks_per_step=2", "group_size=4", "microbatch=8", "eval.tasks=4", "eval.best_of_k=0"]


def main() -> None:
    for changes in ([], ["text_to_image=null"]):
        found = dry_run(load("playground/enhancer-joint", [*SMALL, *changes]), MACHINES["h100"])
        ((_, held),) = found.stages["update"].peaks.values()
        flops = sum(found.stages["update"].work.flops.values())
        sys.stdout.write(json.dumps({"flops": flops, "held": held, "checkpoint": found.checkpoint}) + "\n")


if __name__ == "__main__":
    main()
