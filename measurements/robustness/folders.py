"""Applies every fault of tests/support/folder_faults.py to the folder of an interrupted run, and resumes the run.

    python measurements/robustness/folders.py [--out FOLDER] [--every N] [--only REGEX]

Prints one line per fault and the number of each outcome. The exit code is 1 if anything was lost or changed silently, or if a run
ended with a traceback.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests" / "support"))
import folder_faults as faults  # noqa: E402
from kill_places import import_models, run_in_fork  # noqa: E402


def outcomes(out: Path, *, every: int = 1, only: str = "") -> Iterator["faults.Outcome"]:
    """Resume the run after every ``every``-th fault whose name matches the regular expression ``only``."""
    import_models()

    whole, base = faults.six_step_recipe(out, "whole"), faults.six_step_recipe(out, "base")
    assert run_in_fork(lambda: faults.train(whole), out / "whole.log") == 0, (out / "whole.log").read_text()
    assert run_in_fork(lambda: faults.train_until_killed(base), out / "base.log") == -9, (out / "base.log").read_text()
    for number, fault in enumerate([name for name in faults.FAULTS if re.search(only, name)][::every]):
        made = faults.six_step_recipe(out, f"fault-{number}")
        shutil.copytree(base.folder, made.folder, symlinks=True)
        recipe = (made.folder / "recipe.json").read_text().replace('"base"', f'"{made.name}"')
        (made.folder / "recipe.json").write_text(recipe)
        faults.FAULTS[fault](made.folder)
        before, log = faults.contents(made.folder), out / f"{made.name}.log"
        code = run_in_fork(lambda made=made: faults.train(made), log)
        yield faults.judge_outcome(fault, code, log.read_text(), before=before, folder=made.folder, whole=whole.folder)
        shutil.rmtree(made.folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=1, help="apply only every N-th fault")
    parser.add_argument("--only", default="", metavar="REGEX", help="apply only faults whose name matches")
    arguments = parser.parse_args()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        for outcome in outcomes(out, every=arguments.every, only=arguments.only):
            counted[outcome.kind] += 1
            print(f"{outcome.kind:20s} {outcome.fault:70s} {outcome.text[:150]}", flush=True)
    print(f"\n{sum(counted.values())} faults: " + ", ".join(f"{count} {kind}" for kind, count in counted.most_common()))
    return int(counted["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
