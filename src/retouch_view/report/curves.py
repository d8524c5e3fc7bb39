"""The curves of the page: the reward with held-out evaluations, signals of healthy training, and all other metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from retouch.records.summary import Summary
from retouch_view.report.charts import Chart, Level, Line, bars, draw
from retouch_view.report.markup import Html, tag
from retouch_view.report.numbers import format_duration, format_number, format_percent
from retouch_view.report.series import Point, average_points, average_with_envelope, running_mean
from retouch_view.report.tables import columns_of, interval

# The most important metrics, with an explanation of each.
SIGNALS = {
    "policy/ratio_max_first": "largest |ratio − 1| before the first optimizer step; 0 up to rounding",
    "policy/clip_fraction": "fraction of actions whose ratio was clipped",
    "policy/approx_kl": "how far each step moves the policy",
    "policy/kl": "KL divergence from the reference",
    "policy/loss": "the training loss; for policy gradients its sign and size mean little",
    "policy/grad_norm": "gradient norm before clipping",
    "group/zero_std_fraction": "fraction of groups whose rewards are all equal, so that they give no gradient",
    "reward/missing_fraction": "fraction of samples without a reward, because the judge failed",
    "reward/fault_fraction": "fraction of unusable outputs of the policy",
}
# The metrics that are watched for reward hacking, with an explanation of each.
WATCHED = {
    "watch/proxy": "the training reward on the watched held-out tasks",
    "watch/heldout": "the score of a judge that does not train, on the same images",
    "watch/heldout_sigmas": "change of that score since its best value, in standard errors",
    "watch/heldout_missing": "fraction of images that the held-out judge could not score",
    "watch/diversity": "root mean square difference of two images of a group",
    "watch/canary_shift": "change of the judge's scores of fixed images, as a fraction of their range",
    "watch/text_to_judge": "fraction of images with text that addresses a judge",
    "watch/unrequested_text": "fraction of images with text that was not requested",
    "watch/preservation": "how well the source is preserved outside the mask",
    "watch/brightness": "mean luminance",
    "watch/saturation": "mean saturation",
    "watch/detail": "energy of the finest frequencies",
}
ALARM = "watch/alarm/"
HEADLINE_ROW = "headline"  # row of the held-out table with the tasks of the summary; absent if the summary is about all tasks
AGGREGATES = ("reward/mean", "reward/std", "reward/count", "reward/ci95", "reward/missing_fraction")
NOT_METRICS = ("step", "phase")


def number(value: Any) -> float:
    """A logged value as a float; NaN for null or text."""
    return float(value) if isinstance(value, int | float) else math.nan


def metric_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """All metrics of the run, in the order of their first occurrence."""
    return list(dict.fromkeys(name for line in metrics for name in line if name not in NOT_METRICS))


def headline_column(evals: Sequence[Mapping[str, Any]], summary: Summary | None) -> str | None:
    """The held-out column that represents the run: the summary's, otherwise the reward, otherwise the first."""
    columns = [column for line in evals for column in columns_of(line)]
    preferred = ([summary.column] if summary else []) + ["reward", "overall", *columns]
    return next((column for column in preferred if column in columns), None)


def heldout_points(evals: Sequence[Mapping[str, Any]], *, column: str) -> list[Point]:
    """Return the mean and its interval at each evaluation of the first split: over the headline tasks if they have a row, otherwise
    over all tasks."""
    points = []
    for line in sorted(evals, key=lambda line: int(line["step"])):
        if line["split"] == evals[0]["split"]:
            row = HEADLINE_ROW if HEADLINE_ROW in line["table"] else "all"
            low, high = interval(line, row=row, column=column) or (math.nan, math.nan)
            points.append(Point(line["step"], number(line["table"].get(row, {}).get(column)), low, high))
    return points


def reward_points(metrics: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The mean reward of each step's samples, with its 95 % interval. Older runs have no intervals."""
    points = []
    for line in metrics:
        mean, half = (number(line.get(f"reward/{name}")) for name in ("mean", "ci95"))
        points.append(Point(line["step"], mean, mean - half, mean + half))
    return points


def boundaries(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return (last step before the phase, name of the phase) for each phase; empty if the run has a single phase."""
    starts = [
        (int(line["step"]) - 1, str(line["phase"]))
        for earlier, line in zip([None, *metrics], metrics, strict=False)
        if earlier is None or earlier["phase"] != line["phase"]
    ]
    return starts if len(starts) > 1 else []


def reward_section(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], summary: Summary | None, *, split: str
) -> Html | None:
    """Draw the training reward and the evaluations, in one chart if their scales match, otherwise in two; None without values.

    ``split``: how to call the evaluation tasks, for example "held-out".
    """
    raw = reward_points(metrics)
    column = headline_column(evals, summary)
    heldout = heldout_points(evals, column=column) if column else []
    has_reward = any(math.isfinite(point.y) for point in raw)
    if not has_reward and not heldout:
        return None
    last_step = max([int(line["step"]) for line in metrics] + [int(line["step"]) for line in evals])
    training = _training_lines(raw) if has_reward else []
    marks = [Line(f"{split} {column}", "held", heldout)] if heldout else []
    levels = _levels(summary, heldout) if summary and column == summary.column else []
    phases = boundaries(metrics)
    one_chart = not training or not marks or _same_scale(raw, heldout)
    charts = [(training, marks, levels)] if one_chart else [(training, [], []), ([], marks, levels)]
    drawn = [
        draw(Chart("Reward over steps", lines, last_step, marks=dots, levels=rules, boundaries=phases, tall=True, tick_count=5))
        for lines, dots, rules in charts
    ]
    return tag("div", _legend(training, marks, width=_width(raw)), drawn)


def _training_lines(raw: Sequence[Point]) -> list[Line]:
    thin = average_points(raw)
    return [
        Line("training reward", "train", thin),
        Line("running mean", "train smooth", running_mean(thin, _width(thin)), read=False),
    ]


def _width(points: Sequence[Point]) -> int:
    """The number of points in the running mean: a twentieth of the run, at least 5."""
    return max(5, len(points) // 20)


def _legend(training: Sequence[Line], marks: Sequence[Line], *, width: int) -> Html:
    entries = []
    if training:
        entries.append(("train", "training reward: mean of each step's samples, band 95 %, groups as clusters"))
        if any(math.isfinite(point.y) for point in training[1].points):
            entries.append(("train smooth", f"mean of the last {width} steps"))
    entries += [("held", f"{line.name}: without exploration noise, bars 95 %") for line in marks]
    return tag("ul", [tag("li", tag("span", class_=f"swatch {style}"), words) for style, words in entries], class_="legend")


def _levels(summary: Summary, heldout: Sequence[Point]) -> list[Level]:
    """Return the reference levels for the held-out points; empty if the summary and the points are about different tasks."""
    if not heldout or not math.isclose(heldout[0].y, summary.before, rel_tol=1e-4):
        return []
    levels = [] if summary.ceiling is None else [Level("ceiling", summary.ceiling)]
    if summary.best_of_k is not None:
        levels.append(Level(f"best of {summary.k or 'k'}, base", summary.best_of_k, label_below=True))
    return levels


def _same_scale(one: Sequence[Point], other: Sequence[Point]) -> bool:
    """Whether both can share an axis without flattening either: their gap is at most the sum of their ranges."""
    (low, high), (other_low, other_high) = (
        (min(values), max(values)) for values in ([v for p in points for v in p.span] or [0.0] for points in (one, other))
    )
    gap = max(low - other_high, other_low - high, 0.0)
    return gap <= (high - low) + (other_high - other_low)


def signal_charts(metrics: Sequence[Mapping[str, Any]]) -> tuple[list[Html], list[Html]]:
    """Return two lists of small charts: the signals and reward columns, and all other metrics."""
    names = metric_names(metrics)
    first = [name for name in SIGNALS if name in names]
    first += [name for name in names if name.startswith("reward/") and name not in (*SIGNALS, *AGGREGATES)]
    rest = [name for name in names if name not in first and name not in AGGREGATES and not name.startswith("watch/")]
    return [_small(metrics, name) for name in first], [_small(metrics, name) for name in rest]


def watch_charts(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Return small charts of the watched metrics, over the steps that measured them."""
    names = metric_names(metrics)
    return [_small([line for line in metrics if name in line], name) for name in WATCHED if name in names]


def alarms(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the steps of the alarms, by the name of the rule that raised them."""
    found: dict[str, list[int]] = {}
    for line in metrics:
        for name in line:
            if name.startswith(ALARM):
                found.setdefault(name.removeprefix(ALARM), []).append(int(line["step"]))
    return found


def _small(metrics: Sequence[Mapping[str, Any]], name: str) -> Html:
    points = [Point(line["step"], number(line.get(name))) for line in metrics]
    known = [point for point in points if math.isfinite(point.y)]
    chart = Chart(name, [Line(name.rpartition("/")[2], "plain", average_with_envelope(points, 160))], int(metrics[-1]["step"]))
    latest = format_number(known[-1].y) if known else "no value yet"
    note = (SIGNALS | WATCHED).get(name)
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("span", name, class_="name"),
            tag("span", latest, class_="latest"),
            tag("span", note, class_="note") if note else None,
        ),
        draw(chart),
        class_="small",
    )


def time_bars(timings: Sequence[Mapping[str, Any]]) -> Html | None:
    """The fraction of time of each stage. Time of ``time/step`` that no stage accounts for is shown as "other"."""
    spent: dict[str, float] = {}
    for line in timings:
        for name, seconds in line.items():
            if name.startswith("time/") and math.isfinite(number(seconds)):
                spent[name] = spent.get(name, 0.0) + float(seconds)
    step_time = spent.pop("time/step", 0.0)
    stages = math.fsum(spent.values())
    total = max(step_time, stages)
    if total <= 0:
        return None
    rows = sorted(((name.removeprefix("time/"), seconds) for name, seconds in spent.items()), key=lambda row: -row[1])
    if step_time > stages * 1.001:
        rows.append(("other", step_time - stages))
    steps = len(timings)
    return bars(
        (name, s / total, f"{format_percent(s / total)} · {format_duration(s)} · {format_duration(s / steps)} a step")
        for name, s in rows
    )


def seconds_spent(timings: Sequence[Mapping[str, Any]]) -> float:
    """Return the total time in seconds: for each step ``time/step`` if it was logged, otherwise the sum of its stages."""
    total = 0.0
    for line in timings:
        stages = [number(value) for name, value in line.items() if name.startswith("time/") and name != "time/step"]
        step_time = number(line.get("time/step"))
        total += step_time if math.isfinite(step_time) else math.fsum(filter(math.isfinite, stages))
    return total
