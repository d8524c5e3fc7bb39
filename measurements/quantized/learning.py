"""Does a LoRA learn over a quantised base? Runs recipes of the playground with the full base, with 8 and with 4 bits.

    python measurements/quantized/learning.py FOLDER > measurements/quantized/learning.jsonl
    python measurements/quantized/learning.py FOLDER --recipes playground/grpo --steps 30 --seeds 0 1 2

Prints a line of JSON for each recipe, base and seed: the headline before and after, and the share of the gap that the run closes.
Interrupted runs go on. `measurements/results/results.py --only none` puts the lines of learning.jsonl into docs/results.md.
"""

import argparse
import json
import time
from pathlib import Path

from retouch import Trainer
from retouch.recipe.recipe import load

BASES = (None, "8bit", "4bit")
LORA = {"kind": "lora", "rank": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "playground/grpo"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    runs = [(seed, recipe, base) for seed in given.seeds for recipe in given.recipes for base in BASES]
    for seed, recipe, base in runs:
        words = {"policy.train": LORA, "policy.base": base and {"quantize": base}, "steps": given.steps, "seed": seed}
        words |= {"learning_rate": 1e-3, "out": str(given.folder), "name": f"{Path(recipe).name}-{base or 'full'}-{seed}"}
        words |= {"eval.tasks": 110, "eval.best_of_k": 0, "eval.every": 0, "samples.every": 0, "device": "cpu"}
        trainer = Trainer.from_recipe(load(recipe, [f"{key}={json.dumps(value)}" for key, value in words.items()]), progress=False)
        found = trainer.train()
        assert found is not None, "the run was stopped"
        line = {"recipe": recipe, "base": base, "seed": seed, "steps": given.steps, "date": time.strftime("%Y-%m-%d")}
        line |= {"before": found.before, "after": found.after, "ceiling": found.ceiling, "gap_closed": found.gap_closed}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
