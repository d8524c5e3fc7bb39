"""Applies the faults of tests/support/rank_faults.py to a run on two ranks with sharded weights.

    python measurements/robustness/ranks.py [--only REGEX]

Measures how soon the run ends, and checks that it ends with the same bits as an undisturbed run after it is resumed. Linux only.
The network fault needs the right to create network namespaces (root); without it, this fault is left out, and the output says so.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests" / "support"))
import rank_faults as faults  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="apply only faults whose name matches")
    arguments = parser.parse_args()
    wrong = count = 0
    with tempfile.TemporaryDirectory() as out:
        whole = faults.run_without_faults(Path(out))
        for fault in faults.FAULTS:
            if not re.search(arguments.only, fault):
                continue
            if fault.startswith("the network") and not faults.can_partition():
                print(f"left out  {fault}: no right to create a network namespace", flush=True)
                continue
            found = faults.outcome(fault, Path(out), whole)
            count, wrong = count + 1, wrong + bool(found.wrong)
            verdict = f"WRONG: {found.wrong}" if found.wrong else "same bits"
            print(f"{fault:42s} exit {found.code:4d} after {found.seconds:5.1f} s  {verdict}  {found.text[:140]}", flush=True)
    print(f"\n{count} faults, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
