"""`make league`: which algorithm learns best for the same budget? Processes the queue of runs and writes docs/league.md.

    python measurements/league/league.py                                   # every world, contestant, trial and seed that is missing
    python measurements/league/league.py --worlds editor-exact --contestants Flow-CPS --trials 3 --seeds 1
    python measurements/league/league.py --minutes 30                      # begin no run after half an hour
    python measurements/league/league.py --page                            # only write the page
    python measurements/league/league.py --device cuda                     # the same league on a GPU, with records of its own

Start one process per processor, also on several machines that share the folder: the processes share the queue, and no process
repeats the work of another. The same command continues after an interruption. Finished runs are in `kept/`, and a recipe that was
run before is not run again; `--again` repeats final runs whose records lack scores that newer records have. With `--device cuda`,
everything is written to `runs/league-cuda`. Needs Optuna: `pip install --editable '.[league]'`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import runs
from league_page import write
from runs import share_of_gap
from tournament import Job, Plan, Queue
from worlds import ROOT, WORLDS, World, digest, recipe_of

KEPT = Path(__file__).parent / "kept"
FOLDER = ROOT / "runs" / "league"
Train = Callable[..., dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [world.name for world in WORLDS]
    parser.add_argument("--worlds", nargs="*", choices=names, default=names, metavar="WORLD", help=", ".join(names))
    parser.add_argument("--contestants", nargs="*", default=[], metavar="NAME", help="names of contestants; default: all")
    parser.add_argument("--trials", type=int, default=3, help="settings that are tried for each contestant")
    parser.add_argument("--seeds", type=int, default=3, help="final runs of each contestant")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the runs train")
    parser.add_argument("--again", action="store_true", help="repeat final runs without the scores of tasks during training")
    given = parser.parse_args()
    own = FOLDER.with_name(f"league-{given.device}")
    kept, folder = (KEPT, FOLDER) if given.device == "cpu" else (own / "kept", own / "queue")
    if not given.page:
        worlds = [world for world in WORLDS if world.name in given.worlds]
        until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
        plan, how = Plan(given.trials, given.seeds), {"device": given.device, "again": given.again}
        work(worlds, plan, only=given.contestants, until=until, folder=folder, kept=kept, **how)
    page = write(kept) if given.device == "cpu" else write(kept, file=own / "league.md", pictures=own / "pictures")
    print(f"wrote {page.relative_to(ROOT)}")


def work(
    worlds: Sequence[World],
    plan: Plan,
    *,
    only: Sequence[str] = (),
    until: float | None = None,
    folder: Path = FOLDER,
    kept: Path = KEPT,
    train: Train = runs.train,
    device: str = "cpu",
    again: bool = False,
) -> int:
    """Process the queue until it is empty or until the time ``until`` (``time.monotonic``). Returns the number of runs.

    ``train`` runs a recipe in a folder and returns the record of the run. ``device``: of the recipes. ``again``: see ``result``.
    """
    done = 0
    with Queue(folder) as queue:
        while (until is None or time.monotonic() < until) and (job := queue.claim(worlds, plan, only=only)) is not None:
            try:
                record = result(queue, job, kept, train, device=device, again=again)
            except BaseException:
                job.give_up()
                raise
            job.finish(share_of_gap(record))
            done += 1
            what = f"{job.world.name}, {job.contestant.name}, {job.stage} {job.number}"
            print(f"{what}: {share_of_gap(record):+.3f} of the gap, {record['cpu_seconds']:.0f} CPU s", flush=True)
    return done


def result(queue: Queue, job: Job, kept: Path, train: Train, *, device: str = "cpu", again: bool = False) -> dict[str, Any]:
    """Return the record of a kept run with the recipe of this job. If there is none, run the recipe and keep its record.

    ``again``: a final run whose record lacks the scores of tasks during training is repeated. If the repeated run ends with other
    scores, as on another kind of CPU, the first record is kept.
    """
    recipe = recipe_of(job.world, job.contestant, job.settings, stage=job.stage, seed=job.seed, device=device)
    key = digest(recipe)
    stored = runs.read(kept, job.world, job.contestant.name).get(key)
    lacking = stored is not None and stored["stage"] == "final" and stored["ended"] == "finished" and "between" not in stored
    if stored is not None and not (again and lacking):
        return stored
    record = {**_about(job), **train(recipe, queue.folder / f"{key}-{queue.name}", world=job.world)}
    if stored is not None:
        if record.get("curve") != stored["curve"] or record.get("after") != stored["after"]:
            what = f"{job.world.name}, {job.contestant.name}, seed {job.seed}"
            print(f"{what}: ended with other scores; the first record is kept", flush=True)
            return stored
        record = {**stored, "between": record["between"]}
    with queue.exclusive():
        runs.keep(kept, job.world, job.contestant.name, {**runs.read(kept, job.world, job.contestant.name), key: record})
    return record


def _about(job: Job) -> dict[str, Any]:
    return {"stage": job.stage, "number": job.number, "seed": job.seed, "settings": dict(job.settings)}


if __name__ == "__main__":
    sys.exit(main())
