"""Cross-validation of a recipe for photographs: every photograph is held out in exactly one run.

pip install scikit-image scikit-learn
python measurements/playground/photographs.py ten
python measurements/playground/photograph_folds.py ten recipes/photos.jsonnet

Which photographs a run holds out depends on its seed. The script finds seeds that together hold out each photograph once, the first
ones in lexicographic order. It makes these runs, and prints the gain of each run and of all runs together. The interval of the
latter has one cluster for each photograph. Runs that are finished are not repeated.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from retouch.core.intervals import MeanEstimate, paired_change
from retouch.data.sources.folder import read_folder
from retouch.data.tasks import split_by_source
from retouch.records.folder import RunFolder

SEEDS = 100
RUNS = Path("runs/photograph-folds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder that photographs.py wrote")
    parser.add_argument("recipe", type=Path, help="recipes/photos.jsonnet or recipes/photos-nft.jsonnet")
    parser.add_argument("--runs", type=int, default=5, help="number of runs")
    chosen = parser.parse_args()
    rows = read_folder(chosen.folder)
    source_of = {rows[index].id: rows[index].source for index in range(len(rows))}
    sources = list(source_of.values())
    share, rest = divmod(len(set(sources)), chosen.runs)
    if rest:
        raise SystemExit(f"{len(set(sources))} photographs cannot be divided into {chosen.runs} equal parts")
    held_out = share * len(sources) // len(set(sources))
    before_all: dict[str, float] = {}
    after_all: dict[str, float] = {}
    print("| seed | held out | before | after | gain |\n| --- | --- | --- | --- | --- |", flush=True)
    for seed in seeds_of_folds(sources, held_out=held_out, runs=chosen.runs):
        run = train(chosen.recipe, chosen.folder, seed=seed, held_out=held_out)
        before, after = (run.read_scores(step)["reward"] for step in (0, run.read_evals()[-1]["step"]))
        names = ", ".join(sorted({source_of[task] for task in before}))
        gain = paired_change(before, after, source_of).mean
        print(f"| {seed} | {names} | {fmean(before.values()):.3f} | {fmean(after.values()):.3f} | {gain:+.3f} |", flush=True)
        before_all |= before
        after_all |= after
    print(f"\n{as_text(paired_change(before_all, after_all, source_of))}")


def seeds_of_folds(sources: Sequence[str], *, held_out: int, runs: int) -> tuple[int, ...]:
    """Find seeds whose runs hold out every source exactly once."""
    parts = {seed: _held_out(sources, held_out=held_out, seed=seed) for seed in range(SEEDS)}
    found = _partition(frozenset(sources), list(parts.items()), runs)
    if found is None:
        raise SystemExit(f"no {runs} of the seeds below {SEEDS} hold out each photograph once")
    return found


def _partition(left: frozenset[str], parts: Sequence[tuple[int, frozenset[str]]], runs: int) -> tuple[int, ...] | None:
    if runs == 0:
        return None if left else ()
    for index, (seed, part) in enumerate(parts):
        if part <= left and (rest := _partition(left - part, parts[index + 1 :], runs - 1)) is not None:
            return seed, *rest
    return None


def _held_out(sources: Sequence[str], *, held_out: int, seed: int) -> frozenset[str]:
    return frozenset(sources[row] for row in split_by_source(sources, held_out=held_out, seed=seed).held_out)


def train(recipe: Path, folder: Path, *, seed: int, held_out: int) -> RunFolder:
    """Make the run of a seed, or continue it, and return its folder."""
    name = f"{recipe.stem}-seed-{seed}"
    changes = {"name": name, "out": RUNS, "seed": seed, "data.path": folder, "data.held_out": held_out, "eval.tasks": held_out}
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    RUNS.mkdir(parents=True, exist_ok=True)
    with open(RUNS / f"{name}.log", "w", encoding="utf-8") as log:
        subprocess.run([sys.executable, "-m", "retouch", "train", str(recipe), *settings], stdout=log, stderr=log, check=True)
    return RunFolder(RUNS / name)


def as_text(found: MeanEstimate) -> str:
    low, high = found.interval or (float("nan"), float("nan"))
    return f"gain {found.mean:+.3f} ({low:+.3f} to {high:+.3f}), {found.count} tasks from {found.clusters} photographs"


if __name__ == "__main__":
    main()
