"""`make gpu`: checks of this library on a GPU, which need no network and take at most 9 minutes.

    python measurements/gpu/run.py [--dry-run] [--out FOLDER] [--minutes M] [--only NAME ...]

NAME is a check or a group of checks. Each check is a function in a file next to this one, which yields values with their bounds;
docs/machines.md explains how to read the results. A dry run does the same on the CPU with tiny models, and with longer time limits
for a busy machine. The exit code is 1 if a check failed or no check passed.
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

from findings import table
from suite import Check, run_suite

S, C, M = "speed", "correctness", "memory"
CHECKS = (
    # The most important check comes first: the first four take less than 4 minutes. The seconds were measured on an H100, except
    # those of writer (stopped after 31 s), sd3-step and sd3-loops (with one step more), fsdp (with fewer steps), and qwen-image,
    # learns and qwen-image-2, which never ran: these are estimates. They sum to less than the deadline; sglang, which never ran
    # either, gets the time that is left. The limits, at least 1.2 times the seconds, end checks that hang.
    Check("environment", "environment:run", limit=34, seconds=26, groups=(S,)),
    Check("sd3-step", "steps:sd3", limit=62, seconds=42, groups=(S, M)),
    Check("writer", "writer:run", limit=56, seconds=40, groups=(S,)),
    Check("qwen-image", "steps:qwen_image", limit=100, seconds=76, groups=(S, M)),
    Check("parity", "parity:run", limit=17, seconds=13, groups=(C,)),
    Check("sd3-loops", "loops:run", limit=102, seconds=75, groups=(S,)),
    Check("learns", "learns:run", limit=80, seconds=60, groups=(C,)),
    Check("sd3-ratios", "ratios:sd3", limit=40, seconds=32, groups=(C,)),
    Check("resume", "resume:run", limit=32, seconds=24, groups=(C,)),
    Check("qwen-step", "steps:qwen", limit=68, seconds=55, groups=(S, M)),
    Check("flux-fill", "steps:flux_fill", limit=44, seconds=35, groups=(M,)),
    Check("fsdp", "fsdp:run", limit=28, seconds=20, groups=(C,)),
    Check("qwen-ratios", "ratios:qwen", limit=16, seconds=12, groups=(C,)),
    Check("qwen-image-2", "steps:qwen_image_2", limit=36, seconds=24, groups=(S, M)),
    Check("sglang", "image_server:run", limit=45, groups=(C,)),
)
MINUTES = 9.0
DRY_TIMES = 30
"""The time limits of a dry run are this many times longer."""


def main() -> int:
    names = [*dict.fromkeys(group for check in CHECKS for group in check.groups), *(check.name for check in CHECKS)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU, with tiny models")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="folder for the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M", help="time limit of all checks together")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"groups or checks to run: {', '.join(names)}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes of the checks as well
    times = DRY_TIMES if arguments.dry_run else 1
    only = set(arguments.only or names)
    chosen = [replace(each, limit=times * each.limit) for each in CHECKS if only.intersection((each.name, *each.groups))]
    results = run_suite(chosen, arguments.out.resolve(), seconds=60 * arguments.minutes, dry_run=arguments.dry_run)
    print(f"\n{table(results)}")
    statuses = {result.status for result in results}
    return int("fail" in statuses or "pass" not in statuses)


if __name__ == "__main__":
    sys.exit(main())
