"""`make bench`: compares a step to its bare model calls, and the library to a plain one-file Flow-GRPO and to TRL's trainer.

Figures are medians of one run on this machine; both sides of every comparison are measured in turn.
"""

import argparse
import json
import platform
from pathlib import Path

import against_one_file
import against_trl
import step_time
import torch

PARTS = ["step", "one-file", "trl"]
STEPS = {
    "tiny SD3, GRPO": ("tiny-sd3.jsonnet", []),
    "playground, GRPO": ("playground/grpo.jsonnet", []),
    "playground, NFT": ("playground/nft.jsonnet", []),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=9, help="timed repetitions of each step in `step`")
    parser.add_argument("--steps", type=int, default=60, help="steps of both runs in `one-file`")
    parser.add_argument("--trl-steps", type=int, default=40, help="steps of both runs in `trl`")
    named = {setting.name: setting for setting in against_trl.SETTINGS}
    parser.add_argument("--trl-settings", nargs="*", choices=named, default=list(named), help="settings to compare in `trl`")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for all numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured: dict[str, object] = {"torch": torch.__version__, "threads": arguments.threads, "machine": platform.machine()}
    if "step" in arguments.only:
        steps = []
        for name, (recipe, overrides) in STEPS.items():
            print(f"timing {name}: {arguments.rounds} rounds", flush=True)
            steps.append(step_time.measure(name, recipe, rounds=arguments.rounds, overrides=overrides))
        show(step_time.table(steps))
        measured["step_time"] = [each.to_json() for each in steps]
    if "one-file" in arguments.only:
        runs = []
        for seed in arguments.seeds:
            print(f"the tiny SD3, seed {seed}: {arguments.steps} steps of each in turn", flush=True)
            runs.append(against_one_file.measure(seed=seed, steps=arguments.steps))
        show(against_one_file.table(runs))
        measured["against_one_file"] = [each.to_json() for each in runs]
    if "trl" in arguments.only:
        comparisons = []
        for setting in (named[name] for name in arguments.trl_settings):
            for seed in arguments.seeds:
                print(f"TRL, {setting.name}, seed {seed}: {arguments.trl_steps} steps of each in turn", flush=True)
                comparisons.append(against_trl.measure(setting, seed=seed, steps=arguments.trl_steps))
        show(against_trl.table(comparisons))
        measured["against_trl"] = [each.to_json() for each in comparisons]
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2) + "\n")


def show(lines: list[str]) -> None:
    print("\n" + "\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
