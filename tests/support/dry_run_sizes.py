"""Makes dry runs of a step of a recipe at several image sizes, with small and with large chunks, and with few blocks of its models.

    python dry_run_sizes.py NAME

Prints a JSON line per case: the settings, and the error or the stages.
"""

import json
import logging
import os
import sys
import warnings
from unittest.mock import patch

import retouch_plan.dry_run as step
from dry_run_depths import ROOT, VARIABLES
from retouch.recipe.recipe import load
from retouch_plan.dry_run import ERRORS, error_line
from retouch_plan.machines import MACHINES

SIDES, LARGE = (512, 768, 1024), 128


def main(name: str) -> None:
    os.environ.update(dict.fromkeys(VARIABLES, "http://localhost") | {"APP__RUN_NAME": "named"})
    file = ROOT / "recipes" / f"{name}.jsonnet"
    recipe = load(file)
    sized = next(
        (
            key
            for key, model in (("policy.model", recipe.policy.model), ("renderer.model", recipe.image_model))
            if getattr(model, "size", None)
        ),
        None,
    )
    tasks = -(-LARGE // recipe.group_size)
    for side in SIDES if sized else (None,):
        for chunk in (recipe.group_size, LARGE):
            changes = ["ranks=1", f"tasks_per_step={tasks + -tasks % recipe.minibatches}", f"rollout.chunk={chunk}"]
            changes += [f"eval.batch={min(chunk, LARGE)}", f"eval.tasks={min(chunk, LARGE)}"]
            changes += [] if side is None else [f"{sized}.size=[{side},{side}]"]
            if side is not None and hasattr(recipe.rollout, "max_new_tokens"):  # one token for 8 x 8 pixels, and one for each row
                changes += [f"rollout.max_new_tokens={recipe.rollout.max_new_tokens + side // 8 * (side // 8 + 1)}"]
            line: dict[str, object] = {"changes": changes}
            try:
                # Errors do not depend on the depth, so the smaller of the two dry runs is enough.
                with patch.object(step, "each_in_turn", lambda run, first, second: (run(first),) * 2):
                    line["stages"] = list(step.dry_run(load(file, changes), MACHINES["h200"]).stages)
            except ERRORS as error:
                line["error"] = error_line(error)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main(sys.argv[1])
