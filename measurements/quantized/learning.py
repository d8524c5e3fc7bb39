"""Does a LoRA learn over a quantised base? Runs a playground recipe with the full base, with 8 and with 4 bits.

    python measurements/quantized/learning.py FOLDER [--recipe playground/grpo] [--steps 30] [--seeds 0 1 2]

Prints, for each base and seed, the headline before and after, and the share of the gain of the full base. Interrupted runs go on.
"""

import argparse
import json
from pathlib import Path

from retouch import Trainer
from retouch.recipe.recipe import load

BASES = (None, "8bit", "4bit")
LORA = {"kind": "lora", "rank": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="playground/grpo")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    for seed in given.seeds:
        full = None
        for base in BASES:
            words = {"policy.train": LORA, "policy.base": base and {"quantize": base}, "steps": given.steps, "seed": seed}
            words |= {"learning_rate": 1e-3, "out": str(given.folder), "name": f"{base or 'full'}-{seed}", "device": "cpu"}
            words |= {"eval.tasks": 110, "eval.best_of_k": 0, "eval.every": 0, "samples.every": 0}
            recipe = load(given.recipe, [f"{key}={json.dumps(value)}" for key, value in words.items()])
            found = Trainer.from_recipe(recipe, progress=False).train()
            assert found is not None, "the run was stopped"
            full = found.gain if base is None else full
            assert full is not None, "the full base comes first"
            share = f"{found.gain / full:.0%} of the full base's gain"
            print(f"{base or 'full'} seed {seed}: {found.before:.2f} -> {found.after:.2f}, {share}", flush=True)


if __name__ == "__main__":
    main()
