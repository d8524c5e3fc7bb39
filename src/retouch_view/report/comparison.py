"""A comparison of runs as text: held-out scores, paired differences on the same held-out tasks, and what differs in the recipes."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from retouch.recipe.derived_facts import leaves
from retouch.records.folder import RunFolder
from retouch.records.heldout import paired_change, read_scores, read_sources
from retouch_view.report.curves import headline_column, seconds_spent
from retouch_view.report.numbers import MISSING, aligned, decimals_for, format_duration, format_percent, format_score, format_signed


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with its last evaluation. ``before``, ``after``: the known scores of held-out tasks, by id. ``sources``: the sources of
    these tasks, by id."""

    name: str
    recipe: Mapping[str, str]
    column: str
    step: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    sources: Mapping[str, str]
    gap_closed: float | None
    seconds: float


def comparison(folders: Sequence[Path]) -> str:
    """Compare two or more runs; each is compared to the first one.

    The score is the column that the first run reports, on all held-out tasks. A difference is the mean over the tasks that both
    runs evaluated, with a paired 95 % interval (``core.intervals``).

    Raises ValueError for fewer than two runs, for the same run twice, and for a run without an evaluation or without this column.
    """
    if len(folders) < 2:
        raise ValueError("retouch compare RUN RUN...: give at least two runs")
    absolute = [folder.resolve() for folder in folders]
    repeated = [folder for index, folder in enumerate(folders) if absolute[index] in absolute[:index]]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice; compare different runs")
    counts = Counter(path.name for path in absolute)
    # Runs of the same name are named by their folders.
    names = [path.name if counts[path.name] == 1 else str(folder) for path, folder in zip(absolute, folders, strict=True)]
    first = _read(folders[0], names[0])
    runs = [first, *(_read(folder, name, first.column) for folder, name in zip(folders[1:], names[1:], strict=True))]
    decimals = decimals_for(value for run in runs for value in (*run.before.values(), *run.after.values()))
    return "\n".join([*_scores(runs, decimals), "", *_differences(runs, decimals), "", *_recipes(runs)])


def _read(root: Path, name: str, column: str | None = None) -> _Run:
    """Read a run. ``column``: the score; None is the one that the run reports."""
    folder = RunFolder(root)
    recipe, evals, summary = folder.read_recipe()["recipe"], folder.read_evals(), folder.read_summary()
    known = [line for line in evals if line["split"] == evals[0]["split"] and folder.evaluation(line["step"]).exists()]
    reported = headline_column(known, summary)
    if reported is None:
        raise ValueError(f"{root} has no evaluation yet: compare it after its first one, or set eval.every")
    chosen = column or reported
    before, after = (read_scores(folder, known[index]["step"]) for index in (0, -1))
    if chosen not in after:
        raise ValueError(f"{root} has no held-out score {chosen!r}, which the first run reports; it has {', '.join(after)}")
    return _Run(
        name=name,
        recipe={key: json.dumps(value) for key, value in leaves(recipe)},
        column=chosen,
        step=known[-1]["step"],
        before=before[chosen],
        after=after[chosen],
        sources=read_sources(folder, known[-1]["step"]),
        gap_closed=summary.gap_closed if summary is not None and summary.column == chosen else None,
        seconds=seconds_spent(folder.read_timings()),
    )


def _scores(runs: Sequence[_Run], decimals: int) -> Iterator[str]:
    yield f"{runs[0].column} on all held-out tasks, before training and at the last evaluation"
    rows = [["run", "step", "tasks", "before", "after", "change (95 %)", "share of the gap", "time in steps"]]
    for run in runs:
        both = run.before.keys() & run.after.keys()
        ends = [mean(scores[task] for task in both) if both else None for scores in (run.before, run.after)]
        rows.append(
            [
                run.name,
                str(run.step),
                str(len(both)),
                *(format_score(end, decimals) for end in ends),
                _change(run.before, run.after, run.sources, decimals) if run.step else MISSING,
                MISSING if run.gap_closed is None else format_percent(run.gap_closed),
                format_duration(run.seconds),
            ]
        )
    yield from aligned(rows)
    if any(run.gap_closed is not None for run in runs):
        yield "The share of the gap is of the tasks of eval.headline, as in summary.json."


def _differences(runs: Sequence[_Run], decimals: int) -> Iterator[str]:
    first = runs[0]
    yield f"Difference to {first.name} at the last evaluation, on the same held-out tasks (95 %)"
    rows = []
    for run in runs[1:]:
        shared = len(first.after.keys() & run.after.keys())
        difference = _change(first.after, run.after, run.sources, decimals)
        rows.append([run.name, f"{difference} on {shared} tasks" if shared else "no held-out task in common"])
    yield from aligned(rows)
    yield "The intervals contain the spread between tasks, not the spread between seeds: repeat each run with other seeds."


def _change(before: Mapping[str, float], after: Mapping[str, float], sources: Mapping[str, str], decimals: int) -> str:
    found = paired_change(before, after, sources)
    if not found.count:
        return MISSING
    ends = [format_signed(end, decimals) for end in found.interval or ()]
    return format_signed(found.mean, decimals) + (f" ({' to '.join(ends)})" if ends else "")


def _recipes(runs: Sequence[_Run]) -> Iterator[str]:
    keys = sorted({key for run in runs for key in run.recipe} - {"name", "out"})
    differing = [key for key in keys if len({run.recipe.get(key) for run in runs}) > 1]
    if not differing:
        yield "The recipes do not differ."
        return
    yield "What differs in the recipes"
    rows = [["", *(run.name for run in runs)]]
    rows += [[key, *(run.recipe.get(key, MISSING) for run in runs)] for key in differing]
    yield from aligned(rows)
