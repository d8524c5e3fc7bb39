"""The charts of the report: their points, which the script of the page draws as in `retouch view`; and bars."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from retouch.records.files import jsonable
from retouch.records.folder import Summary
from retouch_view.report.markup import Html, format_duration, format_number, format_percent, tag
from retouch_view.report.tables import headline_column, interval, number

MOST_POINTS = 400
# The most important metrics, with an explanation of each.
SIGNALS = {
    "policy/ratio_max_first": "largest |ratio − 1| before the first optimizer step; 0 up to rounding",
    "policy/clip_fraction": "fraction of actions whose ratio was clipped",
    "policy/approx_kl": "how far each step moves the policy",
    "policy/kl": "KL divergence from the reference",
    "group/zero_std_fraction": "fraction of groups whose rewards are all equal, so that they give no gradient",
    "reward/missing_fraction": "fraction of samples without a reward, because the judge failed",
    "reward/fault_fraction": "fraction of unusable outputs of the policy",
}
NOTES = {"policy/loss": "the training loss", "policy/grad_norm": "gradient norm before clipping"}
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
AGGREGATES = ("reward/std", "reward/count", "reward/ci95", "reward/missing_fraction")
NOT_METRICS = ("step", "phase")


Point: TypeAlias = tuple[float, float, float, float]
"""(step, value, the ends of its interval); NaN if missing."""


def series(name: str, points: Sequence[Point], *, dots: bool = False) -> dict[str, Any]:
    """A line of a chart. Means of consecutive points, so that at most ``MOST_POINTS`` remain. ``dots``: mark each point."""
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    parts = (points[start : start + size] for start in range(0, len(points), size))
    drawn = [part[0] if size == 1 else _mean(part) for part in parts]
    rounded = [[float(f"{value:.6g}") for value in point] for point in drawn]
    return {"name": name, "points": jsonable(rounded), "count": len(points), "dots": dots}


def _mean(part: Sequence[Point]) -> Point:
    known = [value for _, value, _, _ in part if math.isfinite(value)]
    value = math.fsum(known) / len(known) if known else math.nan
    return math.fsum(step for step, *_ in part) / len(part), value, math.nan, math.nan


def draw(caption: str, lines: Sequence[Mapping[str, Any]], end: float, *, size: str = "small", **options: Any) -> Html:
    """A chart over the steps 0 to ``end``. ``options``: those of the function ``chart`` of `retouch view`."""
    document = {"series": lines, "options": {"caption": caption, "axis": "steps", "end": end, **options}, "size": size}
    return tag("figure", tag("figcaption", caption), class_="chart", data_chart=json.dumps(document, separators=(",", ":")))


def bars(rows: Iterable[tuple[str, float, str]]) -> Html:
    """Draw horizontal bars: (name, length from 0 to 1, note behind the bar)."""
    drawn = []
    for name, share, note in rows:
        track = tag("span", tag("span", style=f"width:{100 * share:.2f}%"), class_="track")
        drawn.append(tag("div", tag("span", name, class_="name"), track, tag("span", note, class_="note"), class_="bar"))
    return tag("div", drawn, class_="bars")


def heldout_points(evals: Sequence[Mapping[str, Any]], *, column: str) -> list[Point]:
    """Return the mean and its interval at each evaluation of the first split: over the headline tasks if they have a row, otherwise
    over all tasks."""
    points: list[Point] = []
    for line in sorted(evals, key=lambda line: int(line["step"])):
        if line["split"] == evals[0]["split"]:
            row = HEADLINE_ROW if HEADLINE_ROW in line["table"] else "all"
            low, high = interval(line, row=row, column=column) or (math.nan, math.nan)
            points.append((line["step"], number(line["table"].get(row, {}).get(column)), low, high))
    return points


def reward_section(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], summary: Summary | None, *, split: str
) -> Html | None:
    """Draw the training reward and the evaluations, in one chart if their scales match, otherwise in two; None without values.
    ``split``: how to call the evaluation tasks, for example "held-out"."""
    raw = _points(metrics, "reward/mean")
    column = headline_column(evals, summary)
    heldout = heldout_points(evals, column=column) if column else []
    has_reward = any(math.isfinite(value) for _, value, _, _ in raw)
    if not has_reward and not heldout:
        return None
    end = max([int(line["step"]) for line in metrics] + [int(line["step"]) for line in evals])
    phases = [
        (int(line["step"]) - 1, str(line["phase"]))
        for earlier, line in zip([None, *metrics], metrics, strict=False)
        if earlier is None or earlier["phase"] != line["phase"]
    ]
    shared: dict[str, Any] = {"size": "large", "phases": phases if len(phases) > 1 else []}
    smooth, levels, words = _width(raw), [], []
    if has_reward:
        mean = f"; the strong line is the mean of {smooth} steps" if len(raw) > smooth else ""
        words.append(f"training reward: mean of each step's samples{mean}")
    if heldout:
        last = [line for line in evals if line["split"] == evals[0]["split"]][-1]["table"]
        row = last.get(HEADLINE_ROW, last.get("all", {}))
        words.append(f"{split} {column} of {row.get('n', '?')} tasks: without exploration noise, with 95 % intervals")
    # Levels are drawn only if the summary and the points are about the same tasks.
    if summary and heldout and column == summary.column and math.isclose(heldout[0][1], summary.before, rel_tol=1e-4):
        levels = [] if summary.ceiling is None else [(summary.ceiling, "ceiling")]
        if summary.best_of_k is not None:
            levels.append((summary.best_of_k, f"best of {summary.k or 'k'}, base"))
        levels += [(score, f"{means}, base") for means, score in summary.others.items()]
    lines = [series("training reward", raw)] if has_reward else []
    marks = [series(f"{split} {column}", heldout, dots=True)] if heldout else []
    if not lines or not marks or _same_scale(raw, heldout):
        return draw("Reward over steps", [*lines, *marks], end, **shared, smooth=smooth, levels=levels, help="; ".join(words))
    charts = (
        draw("Training reward over steps", lines, end, **shared, smooth=smooth, help=words[0]),
        draw("Evaluations over steps", marks, end, **shared, levels=levels, help=words[1]),
    )
    return tag("div", charts)


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    return [(line["step"], number(line.get(name)), math.nan, math.nan) for line in metrics]


def _width(points: Sequence[Point]) -> int:
    """The number of points in the running mean: a twentieth of the run, at least 5."""
    return max(5, len(points) // 20)


def _same_scale(one: Sequence[Point], other: Sequence[Point]) -> bool:
    """Whether both can share an axis without flattening either: their gap is at most the sum of their ranges."""
    (low, high), (other_low, other_high) = (
        (min(values), max(values))
        for values in (
            [value for point in points for value in point[1:] if math.isfinite(value)] or [0.0] for points in (one, other)
        )
    )
    gap = max(low - other_high, other_low - high, 0.0)
    return gap <= (high - low) + (other_high - other_low)


def metric_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """All metrics of the run, in the order of their first occurrence."""
    return list(dict.fromkeys(name for line in metrics for name in line if name not in NOT_METRICS))


def signal_charts(metrics: Sequence[Mapping[str, Any]], *, without: Sequence[str] = ()) -> tuple[list[Html], list[Html], list[str]]:
    """Return two lists of small charts: the signals and reward columns, and all other metrics; and the names of the metrics that
    are 0 at every step, which have no chart. A column that always equals the mean reward has none either."""
    same = {"reward/mean", *without}
    names = [name for name in metric_names(metrics) if name not in same and not name.startswith("watch/")]
    names = [name for name in names if any(line.get(name) != line.get("reward/mean") for line in metrics)]
    zero = [name for name in names if not any(line.get(name) != 0 for line in metrics if name in line)]
    names = [name for name in names if name not in zero]
    first = [name for name in SIGNALS if name in names]
    first += [name for name in names if name.startswith("reward/") and name not in (*SIGNALS, *AGGREGATES)]
    return [_small(metrics, name) for name in first], [_small(metrics, name) for name in names if name not in first], zero


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
    points = _points(metrics, name)
    known = [value for _, value, _, _ in points if math.isfinite(value)]
    latest = f"last {format_number(known[-1])}" if known else "no value"
    note = (SIGNALS | WATCHED | NOTES).get(name)
    words = f"{latest}; {note}" if note else latest
    return draw(name, [series(name, points)], int(metrics[-1]["step"]), smooth=_width(points), help=words)


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
