"""Generates docs/scaling.md and its figure from the kept runs alone."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from league_curves import draw
from league_page import with_interval
from numpy import ndarray
from ranking import Finals, resampled
from runs import diverged
from scaling_fit import FORMS, chosen, extrapolated, fit
from scaling_points import ALGORITHM, AXES, SAMPLES, Axis, every_point
from worlds import EDITOR, ROOT

from retouch.core.intervals import Interval
from retouch.recipe.recipe import load

PAGE = ROOT / "docs" / "scaling.md"
PICTURE = ROOT / "docs" / "pictures" / "scaling.svg"
TARGET = 0.25
"""The page gives an interval for the number of images that this share of the gap takes."""
RESULTS = ROOT / "measurements" / "results" / "kept"
Record = dict[str, Any]

INTRODUCTION = f"""# Scaling

How does the share of the gap depend on the number of samples, the group size, the number of denoising steps that are trained,
the noise of the judge, and the size of the network? `make scaling` makes this page, and continues where it was stopped; the code is
in `measurements/league`.

All runs start from the playground's editor and train it with {ALGORITHM.name} as in [the league](league.md), with the settings of
the league's first trial, its seeds of final runs and its held-out tasks. Each row changes one thing. Runs have {EDITOR.budget:,}
network evaluations if the table does not say otherwise; a forward pass with its backward pass counts 3. Nothing is tuned for a row:
the learning rate is the same everywhere. What is scored is the average of the weights with a decay of 0.9 per step. After few steps
much of it is still the base model: two thirds after 4 steps, a sixth after 17.

The share of the gap is 0 for the base model and 1 for the score of the right answers. It is the mean over seeds, and over held-out
tasks with two and with three edits. The 95 % intervals are from a bootstrap that draws seeds, and held-out tasks, the same ones for
all rows; with a single seed they do not contain the spread between seeds. The column of differences has the row minus the row that
it is compared with. CPU seconds are those of the whole run with one thread. They are rough, because other processes used the
machine too.
"""
LIMITS = """## What this page does not show

- The networks are tiny (2.5 and 9.6 million parameters), the images are of one kind, and the judge is exact or has an assumed
  error. The fitted curve describes the smaller network on this task. The curve of another network, task, judge or algorithm has to
  be measured.
- The learning rate was chosen for one of the rows. Other group sizes, longer runs and noisier judges may need another one, so a row
  can be worse than it has to be.
- There are few points and few seeds. The fit has two parameters and five points, and it is not known where the curve levels off. A
  share outside the measured range is a guess.
- Group size and trained steps are compared at equal network evaluations. At equal numbers of images or of training steps the order
  may be another one.
"""


def write(kept: Path) -> Path:
    """Write the page and its figure from the kept runs. Returns the page's path."""
    PICTURE.write_text(figure(kept), encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")
    return PAGE


def page(kept: Path) -> str:
    """The text of docs/scaling.md."""
    every = [run for point in every_point() for run in point.records(kept)]
    minutes = sum(run["cpu_seconds"] for run in every) / 60
    lines = [INTRODUCTION, f"{len(every)} runs, {minutes:.0f} CPU minutes.", ""]
    for axis in AXES:
        lines += [f"## {axis.title}", "", axis.text, "", *table(axis, kept), ""]
        if axis is SAMPLES:
            lines += [*curve(kept), ""]
    return "\n".join([*lines, LIMITS])


def finished(axis: Axis, kept: Path) -> list[tuple[str, list[Record]]]:
    """The label and the finished runs of each point, without points that have no finished run."""
    found = [(point.label, [run for run in point.records(kept) if run["ended"] == "finished"]) for point in axis.points]
    return [(label, of) for label, of in found if of]


def shares_of(runs: Sequence[tuple[str, list[Record]]]) -> tuple[list[Finals], list[float]]:
    """For each point, its finished runs as `Finals`, and their mean share of the gap."""
    points = [Finals.of(label, of) for label, of in runs]
    return points, [float(each.shares().mean()) for each in points]


def table(axis: Axis, kept: Path) -> Iterator[str]:
    """The table of an axis, with a row for each point. It has a column for the base model's score if the base models differ."""
    runs = finished(axis, kept)
    points, means = shares_of(runs)
    bases = [statistics.fmean(of[0]["before"]) for _, of in runs]
    with_bases = max(bases) - min(bases) > 0.01
    base = [each.name for each in points].index(axis.base)

    def measure(drawn: Sequence[ndarray]) -> list[float]:
        found = [float(each.mean()) for each in drawn]
        return [*found, *(each - found[base] for each in found)]

    intervals = resampled(points, measure)
    header = [axis.unit, "base model"] if with_bases else [axis.unit]
    header += ["training steps", "images", "share of gap", f"difference to {axis.base}", "of each seed", "CPU s"]
    yield f"| {' | '.join(header)} |"
    yield "| --- " * len(header) + "|"
    for k, (label, of) in enumerate(runs):
        difference = "" if k == base else with_interval(means[k] - means[base], intervals[len(points) + k])
        seeds = ", ".join(f"{share:.2f}" for share in points[k].shares().mean(axis=1))
        seconds = statistics.fmean(run["cpu_seconds"] for run in of)
        first = [label, f"{bases[k]:.2f}"] if with_bases else [label]
        cells = [*first, f"{of[0]['steps']}", f"{of[0]['images']:,}", with_interval(means[k], intervals[k]), difference, seeds]
        yield f"| {' | '.join([*cells, f'{seconds:.0f}'])} |"
    ended = [f"{point.label}, seed {run['seed']}" for point in axis.points for run in point.records(kept) if diverged(run)]
    if ended:
        yield f"\nEnded with an error or with a share below -0.1: {'; '.join(ended)}."


def samples_and_shares(kept: Path) -> tuple[list[float], list[float], list[Finals]]:
    """The points to which a curve is fitted: the number of images, the mean share of the gap, and the runs of each point."""
    runs = finished(SAMPLES, kept)
    points, means = shares_of(runs)
    return [float(of[0]["images"]) for _, of in runs], means, points


def curve(kept: Path) -> Iterator[str]:
    """The text on the fitted curves and their errors on the last point."""
    images, means, points = samples_and_shares(kept)
    best = chosen(images, means)

    def measure(drawn: Sequence[ndarray]) -> list[float]:
        found = [float(each.mean()) for each in drawn]
        outside = [extrapolated(form, images, found) for form in FORMS]
        parameters = [value for form in FORMS for value in fit(form, images, found).parameters]
        return [*(each.predicted - each.measured for each in outside), *parameters, fit(best, images, found).samples_for(TARGET)]

    intervals = resampled(points, measure)
    yield (
        f"A curve through the means of the rows, over the number of images n. Each family has two parameters. The error is the\n"
        f"prediction of a fit without the last row ({images[-1]:,.0f} images) minus the measured share of {means[-1]:.2f}."
    )
    yield ""
    yield "| curve | share of gap | a | b | residual without the last row | error on the last row |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for k, form in enumerate(FORMS):
        outside, (a, b) = extrapolated(form, images, means), fit(form, images, means).parameters
        spreads = intervals[len(FORMS) + 2 * k : len(FORMS) + 2 * k + 2]
        cells = [f"**{form.name}**" if form is best else form.name, f"`{form.formula}`"]
        cells += [_parameter(value, spread) for value, spread in zip((a, b), spreads, strict=True)]
        cells += [f"{outside.residual:.3f}", with_interval(outside.predicted - outside.measured, intervals[k])]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "In bold: the family whose residual is smallest. Its error on the last row had no part in this choice."
    takes, between = fit(best, images, means).samples_for(TARGET), intervals[-1]
    assert between is not None, "there are more than two tasks"
    yield (
        f"By the {best.name}, {TARGET:.2f} of the gap takes {takes:,.0f} images ({between.low:,.0f} to {between.high:,.0f}); "
        "`retouch doctor` uses this interval."
    )
    yield ""
    outside, reached = longer_run()
    predicted = [f"{fit(form, images, means).at([outside])[0]:.2f} by the {form.name}" for form in FORMS]
    yield (
        f"Further outside: [`playground/grpo`](results.md) trains {outside:,} images, in steps of twice as many and with another\n"
        f"average of the weights, and closes {reached:.2f}. The fits to all rows predict {', '.join(predicted)}."
    )
    yield ""
    yield "![Share of the gap over images, and the fitted curves](pictures/scaling.svg)"


def longer_run() -> tuple[int, float]:
    """The number of images in a run of ``playground/grpo``, and the share of the gap that it closes (mean of the kept seeds)."""
    found = [json.loads(file.read_text())["result"]["summary"] for file in sorted(RESULTS.glob("playground-grpo-seed-*.json"))]
    recipe = load(str(ROOT / "recipes" / "playground" / "grpo.jsonnet"))
    (phase,) = recipe.resolved_phases()
    return phase.rows * (recipe.steps or 0), statistics.fmean(each["gap_closed"] for each in found)


def _parameter(value: float, interval: Interval | None) -> str:
    return f"{value:.3g}" if interval is None else f"{value:.3g} ({interval.low:.3g} to {interval.high:.3g})"


def figure(kept: Path) -> str:
    """The SVG chart of the mean share of each point, and of each family of curves, fitted to all points."""
    images, means, _ = samples_and_shares(kept)
    between = np.geomspace(images[0], images[-1], 40).tolist()
    lines = {"measured": list(zip(images, means, strict=True))}
    lines |= {form.name: list(zip(between, fit(form, images, means).at(between).tolist(), strict=True)) for form in FORMS}
    return draw(lines, title="Share of the gap over images", unit="images")
