"""`make results`: measures the claims of docs/results.md. Runs each recipe with several seeds and writes the page.

    python measurements/results/results.py                          # make every run that is not kept or not valid
    python measurements/results/results.py --only none              # make no whole run; check the kept runs and write the page
    python measurements/results/results.py --only recipes/quickstart.jsonnet --seeds 0
    python measurements/results/results.py --check recipes/quickstart.jsonnet

A run is kept in `kept/`, in a file named after its recipe and seed. If the code has changed since, the first steps of one seed of
each recipe are repeated and compared to the kept ones; if they differ, all runs of the recipe are repeated as a whole.
"""

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import kept
from kept import ROOT
from page import SECTIONS, Entry, page
from plot import draw

PAGE = ROOT / "docs" / "results.md"
PLOTS = ROOT / "docs" / "pictures"
RUNS = ROOT / "runs" / "results"
TRACED = 3
TRACE = ("reward/mean", "policy/loss", "policy/grad_norm")
# Settings that save time before and between the first steps, without changing these steps.
BRIEFLY = ("eval.tasks=3", "eval.best_of_k=0", "samples.tasks=1", "samples.every=0", "checkpoints.every=0", "trackers=[]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="recipes to run; the rest of the page is written from what is kept")
    parser.add_argument(
        "--check", nargs="*", metavar="RECIPE", help="check the kept runs of these recipes (or of all); write no page"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--renamed", action="store_true", help="recipes changed in names only: kept runs whose first steps are the same stay valid"
    )
    arguments = parser.parse_args()
    entries = [entry for section in SECTIONS for entry in section.entries]
    if arguments.check is not None:
        chosen = [entry for entry in entries if not arguments.check or entry.recipe in arguments.check]
        runs = {entry.recipe: valid_runs(entry, arguments.seeds, renamed=arguments.renamed) for entry in chosen}
        failed = [recipe for recipe, known in runs.items() if not all(known.values())]
        raise SystemExit(f"kept runs that are not valid: {failed}" if failed else 0)
    found: dict[Entry, list[dict]] = {}
    for entry in entries:
        runs = valid_runs(entry, arguments.seeds, renamed=arguments.renamed)
        may_run = not arguments.only or entry.recipe in arguments.only
        runs = {seed: known or (run(entry, seed) if may_run else None) for seed, known in runs.items()}
        results = [known["result"] for known in runs.values() if known]
        if results:
            found[entry] = results
    for section in SECTIONS:
        if section.plot is not None and any(entry in found for entry in section.entries):
            draw({entry.name: found[entry][0]["curve"] for entry in section.entries if entry in found}, PLOTS / section.plot)
    PAGE.write_text(page(found))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def valid_runs(entry: Entry, seeds: Sequence[int], *, renamed: bool = False) -> dict[int, dict | None]:
    """The kept run of each seed; None if there is none, or if the recipe or the code would compute different numbers."""
    runs = {seed: kept.read(entry, seed) for seed in seeds if seed in entry.seeds}
    if not any(runs.values()):
        return runs
    settings, code = kept.settings_digest(entry), kept.code_digest(entry)
    if not renamed:
        runs = {seed: known if known and known["settings"] == settings else None for seed, known in runs.items()}
    known_runs = [known for known in runs.values() if known]
    if all(code in known["code"] and known["settings"] == settings for known in known_runs):
        return runs
    traced = next((known for known in known_runs if known["trace"]), None)
    if traced is None or not same_first_steps(entry, traced):
        return dict.fromkeys(runs)
    for known in known_runs:
        kept.write(entry, {**known, "settings": settings, "code": sorted({*known["code"], code})})
    return runs


def same_first_steps(entry: Entry, known: dict) -> bool:
    """Repeat the first steps of a kept run, and print and return whether they are the same up to rounding."""
    seed = known["result"]["seed"]
    found = first_steps(entry, seed)
    equal = same(found, known["trace"])
    outcome = "the same bits" if found == known["trace"] else "the same but for rounding" if equal else "DIFFERENT"
    print(f"{entry.recipe}, seed {seed}: the first {TRACED} steps are {outcome}", flush=True)
    return equal


def run(entry: Entry, seed: int) -> dict:
    """Run a recipe as a whole, and keep the result."""
    folder = RUNS / f"{Path(entry.recipe).stem}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    before = children_seconds()
    subprocess.run(command(entry, seed, folder), cwd=ROOT, check=True)
    spent = children_seconds() - before
    known = {
        "settings": kept.settings_digest(entry),
        "result": {"seed": seed, **measured(folder), "cpu_seconds": spent},
        "trace": trace(folder),
        "code": [kept.code_digest(entry)],
    }
    kept.write(entry, known)
    return known


def children_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_steps(entry: Entry, seed: int) -> list[dict]:
    """Start a run, stop it after its first steps, and return the trace of these steps."""
    folder = RUNS / f"{Path(entry.recipe).stem}-{seed}-first-steps"
    shutil.rmtree(folder, ignore_errors=True)
    process = subprocess.Popen([*command(entry, seed, folder), *(part for key in BRIEFLY for part in ("--set", key))], cwd=ROOT)
    while process.poll() is None and len(trace(folder)) < TRACED:
        time.sleep(0.5)
    process.terminate()
    process.wait()
    return trace(folder)


def command(entry: Entry, seed: int, folder: Path) -> list[str]:
    """The command of `retouch train` for a recipe and seed, with the run in ``folder``."""
    settings = (f"seed={seed}", f"name={folder.name}", f"out={folder.parent}")
    train = [sys.executable, "-m", "retouch.cli", "train", entry.recipe]
    return [*train, *(part for setting in settings for part in ("--set", setting))]


def trace(folder: Path) -> list[dict]:
    """The metrics of a run's first steps, as far as they have been written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    steps = [json.loads(line) for line in lines[:TRACED] if line.endswith("\n")]
    return [{name: line[name] for name in TRACE if name in line} for line in steps]


def same(found: Sequence[dict], wanted: Sequence[dict]) -> bool:
    """Whether two traces are equal up to rounding, which may differ between machines."""
    if [sorted(step) for step in found] != [sorted(step) for step in wanted]:
        return False
    pairs = [(step[name], other[name]) for step, other in zip(found, wanted, strict=True) for name in step]
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in pairs)


def measured(folder: Path) -> dict:
    """The results of a run that the page needs."""
    summary = json.loads((folder / "summary.json").read_text())
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ratios = [line["policy/ratio_max_first"] for line in metrics if "policy/ratio_max_first" in line]
    phases = [line["phase"] for line in metrics]
    warm = next((each["table"] for each in evals if 0 < each["step"] == phases.count("warm-up")), None)
    return {
        "summary": summary,
        "before": evals[0]["table"],
        **({} if warm is None else {"warm": warm}),
        "after": evals[-1]["table"],
        "ratio_max_first": max(ratios) if ratios else None,
        "curve": curve(folder, evals, summary["column"]),
    }


def curve(folder: Path, evals: Sequence[dict], column: str) -> list[tuple[float, float]]:
    """For each evaluation: (CPU seconds of the training steps before it, mean of the column)."""
    spent = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    return [
        (round(sum(line["cpu/step"] for line in spent if line["step"] <= each["step"]), 1), each["table"]["all"][column])
        for each in evals
    ]


if __name__ == "__main__":
    main()
