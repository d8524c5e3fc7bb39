"""`make scaling`: measures how the share of the gap depends on samples, group size, trained steps, judge and network size.

    python measurements/league/scaling.py                  # every run that is missing, then the page
    python measurements/league/scaling.py --minutes 30     # begin no run after half an hour
    python measurements/league/scaling.py --page           # only write the page

Writes docs/scaling.md. All runs use one algorithm of the league with the settings of the league's first trial; each point changes
one setting. The same command continues after an interruption. Finished runs are in `kept/scaling`. Start only one process: two
processes would repeat each other's runs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import runs
from runs import share_of_gap
from scaling_page import write
from scaling_points import Point, every_point
from worlds import FIRST_SEED, ROOT, digest, recipe_of

KEPT = Path(__file__).parent / "kept"
FOLDER = ROOT / "runs" / "scaling"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each point")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args()
    if not given.page:
        until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
        work(every_point(), given.seeds, until=until)
    print(f"wrote {write(KEPT).relative_to(ROOT)}")


def work(
    points: Sequence[Point],
    seeds: int,
    *,
    until: float | None = None,
    folder: Path = FOLDER,
    kept: Path = KEPT,
    train: Callable[..., dict[str, Any]] = runs.train,
) -> int:
    """Run every point with each seed that has no kept run yet, until the time ``until`` (``time.monotonic``).

    All points are run with the first seed, then with the second, and so on. ``train`` runs a recipe in a folder and returns the
    record of the run. Returns the number of runs.
    """
    done = 0
    for number in range(seeds):
        for point in points:
            known = runs.read(kept, point.world, point.contestant.name)
            seed = FIRST_SEED["final"] + number
            if any(run["seed"] == seed for run in point.records(kept)):
                continue
            if until is not None and time.monotonic() > until:
                return done
            recipe = recipe_of(point.world, point.contestant, point.settings, stage="final", seed=seed, curve=1)
            about = {"stage": "final", "number": number, "seed": seed, "settings": point.settings}
            record = {**about, **train(recipe, folder / digest(recipe), world=point.world)}
            runs.keep(kept, point.world, point.contestant.name, {**known, digest(recipe): record})
            done += 1
            what = f"{point.contestant.name}, seed {seed}"
            print(f"{what}: {share_of_gap(record):+.3f} of the gap, {record['cpu_seconds']:.0f} CPU s", flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
