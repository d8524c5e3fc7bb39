"""`make gpu`: checks of this library on a GPU, which need no network and take at most 9 minutes.

    python measurements/gpu/run.py [--dry-run] [--out FOLDER] [--minutes M] [--only CHECK ...]

Each check is a function in a file next to this one, which yields values with their bounds; docs/machines.md explains how to read
the results. A dry run does the same on the CPU with tiny models, and with longer time limits for a busy machine. The exit code is
1 if a check failed or no check passed.
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

from findings import table
from suite import Check, run_suite

CHECKS = (
    # The most important check comes first. The limits are 1.2 or more times the seconds on an H100, and sum to less than the
    # deadline. Not measured to their ends are writer, more than 31 s, and sglang, which gets all the time that is left.
    Check("environment", "environment:run", limit=34),
    Check("parity", "parity:run", limit=17),
    Check("sd3-step", "steps:sd3", limit=62),
    Check("sd3-ratios", "ratios:sd3", limit=40),
    Check("sd3-loops", "loops:run", limit=102),
    Check("resume", "resume:run", limit=32),
    Check("qwen-step", "steps:qwen", limit=68),
    Check("flux-fill", "steps:flux_fill", limit=44),
    Check("qwen-ratios", "ratios:qwen", limit=16),
    Check("fsdp", "fsdp:run", limit=28),
    Check("writer", "writer:run", limit=45),
    Check("sglang", "image_server:run", limit=45),
)
MINUTES = 9.0
DRY_TIMES = 30
"""The time limits of a dry run are this many times longer."""


def main() -> int:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU, with tiny models")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="folder for the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M", help="time limit of all checks together")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help=f"checks to run: {', '.join(names)}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes of the checks as well
    times = DRY_TIMES if arguments.dry_run else 1
    chosen = [replace(each, limit=times * each.limit) for each in CHECKS if arguments.only is None or each.name in arguments.only]
    results = run_suite(chosen, arguments.out.resolve(), seconds=60 * arguments.minutes, dry_run=arguments.dry_run)
    print(f"\n{table(results)}")
    statuses = {result.status for result in results}
    return int("fail" in statuses or "pass" not in statuses)


if __name__ == "__main__":
    sys.exit(main())
