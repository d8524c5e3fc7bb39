"""The charts of the report: line charts and bars as inline SVG, from the lines of metrics, evaluations and timings.

The SVG stretches to the available width. Strokes keep their width, and all text is HTML on top of it, so that it stays readable on
a phone. Colours are CSS classes, so that one chart works on light and dark pages.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from retouch.records.folder import Summary
from retouch_view.report.markup import Html, format_duration, format_number, format_percent, tag, tick_label
from retouch_view.report.tables import headline_column, interval, number

SIZE = 1000.0
MOST_POINTS = 240
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


class Point(NamedTuple):
    """The value ``y`` at step ``x``, with the ends of its band; NaN if missing."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan

    @property
    def span(self) -> list[float]:
        """The finite numbers among the value and the ends of its band."""
        return [value for value in (self.y, self.low, self.high) if math.isfinite(value)]


@dataclass(frozen=True, slots=True)
class Line:
    """A line with an optional band. ``name``: its name in the tooltip. ``style``: its CSS class. ``read``: show its values in the
    tooltip."""

    name: str
    style: str
    points: Sequence[Point]
    read: bool = True


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line with a label above it, or below it if ``label_below``."""

    name: str
    y: float
    label_below: bool = False


def draw(
    title: str,
    lines: Sequence[Line],
    last_step: int,
    *,
    marks: Sequence[Line] = (),
    levels: Sequence[Level] = (),
    boundaries: Sequence[tuple[int, str]] = (),
    tall: bool = False,
) -> Html:
    """Draw a chart, without its title. ``marks``: points with intervals. ``boundaries``: (step, name of the phase that begins
    there)."""
    drawn = [*lines, *marks]
    last_step = max(1, last_step)
    values = [value for line in drawn for point in line.points for value in point.span]
    low, high = padded_range([*values, *(level.y for level in levels)])
    y_ticks = axis_ticks(low, high, 5 if tall else 3)

    def x(step: float) -> float:
        return SIZE * step / last_step

    def y(value: float) -> float:
        return SIZE * (high - value) / (high - low)

    def at(point: Point) -> str:
        return f"{x(point.x):.1f} {y(point.y):.1f}"

    def percent(coordinate: float) -> str:
        return f"{100 * coordinate / SIZE:.2f}%"

    def curve(line: Line) -> Iterator[Html]:
        runs = _segments(line.points)
        yield tag("path", d="".join("M" + "L".join(map(at, run)) for run in runs), class_=f"line {line.style}")
        # A value between two missing values is a dot, because a line would not show it.
        dots = "".join(f"M{at(run[0])}h0" for run in runs if len(run) == 1)
        yield tag("path", d=dots, class_=f"lone {line.style}")

    def band(line: Line) -> Html:
        paths = []
        for run in _segments(line.points):
            sides = [point for point in run if math.isfinite(point.low) and math.isfinite(point.high)]
            if sides:
                top = [at(point._replace(y=point.high)) for point in sides]
                bottom = [at(point._replace(y=point.low)) for point in reversed(sides)]
                paths.append("M" + "L".join(top + bottom) + "Z")
        return tag("path", d="".join(paths), class_=f"band {line.style}")

    def mark(line: Line) -> Iterator[Html]:
        # Dots are lines of length 0, because their round ends are not stretched.
        known = [point for point in line.points if math.isfinite(point.y)]
        intervals = "".join(
            f"M{at(point._replace(y=point.low))}V{y(point.high):.1f}"
            for point in known
            if math.isfinite(point.low) and math.isfinite(point.high)
        )
        trail = "M" + "L".join(map(at, known)) if known else ""
        dots = "".join(f"M{at(point)}h0" for point in known)
        for style, path in (("trail", trail), ("interval", intervals), ("dot", dots)):
            yield tag("path", d=path, class_=f"{style} {line.style}")

    rules = [("rule", tick) for tick in y_ticks], [("level", level.y) for level in levels]
    flat = [[tag("path", d=f"M0.0 {y(value):.1f}H{SIZE:g}", class_=style) for style, value in rule] for rule in rules]
    phases = [tag("path", d=f"M{x(step):.1f} 0.0V{SIZE:g}", class_="boundary") for step, _ in boundaries if step > 0]
    curves = [piece for line in lines for piece in curve(line)]
    dots = [piece for line in marks for piece in mark(line)]
    svg = tag(
        "svg",
        [*flat[0], *phases, *flat[1], *map(band, lines), *curves, *dots],
        viewBox=f"0 0 {SIZE:g} {SIZE:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_description(title, drawn),
    )
    level_labels = [
        tag(
            "span",
            f"{level.name} {format_number(level.y)}",
            class_="level-label below" if level.label_below else "level-label",
            style=f"top:{percent(y(level.y))}",
        )
        for level in levels
    ]
    ends = [*(step for step, _ in boundaries[1:]), last_step]
    phase_labels = [
        tag("span", name, class_="phase-label", style=f"left:{percent(x(step))};max-width:{percent(x(end - step))}")
        for (step, name), end in zip(boundaries, ends, strict=False)
    ]
    area = tag("div", svg, level_labels, phase_labels, class_="area", data_hover=_tooltips(drawn, last_step))
    gap = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else high - low
    left = [tag("span", tick_label(tick, gap), style=f"top:{percent(y(tick))}") for tick in y_ticks]
    steps = [tick for tick in axis_ticks(0.0, float(last_step), 6 if tall else 3) if tick.is_integer()]
    below = [tag("span", format_number(int(tick)), style=f"left:{percent(x(tick))}") for tick in steps]
    plot = "plot tall" if tall else "plot"
    return tag("div", tag("div", left, class_="y"), area, tag("div", below, class_="x"), class_=plot)


def _segments(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.y):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _tooltips(lines: Sequence[Line], last_step: int) -> str:
    """The tooltips as JSON: [position from 0 to 1, text] for each step with a value."""
    rows: dict[float, list[str]] = {}
    for line in lines:
        for point in line.points:
            if line.read and math.isfinite(point.y):
                ends = f" ({format_number(point.low)} to {format_number(point.high)})"
                band = ends if math.isfinite(point.low) and point.low < point.high else ""
                rows.setdefault(point.x, []).append(f"{line.name} {format_number(point.y)}{band}")
    return json.dumps([[round(x / last_step, 4), "\n".join([f"step {x:.0f}", *rows[x]])] for x in sorted(rows)])


def _description(title: str, lines: Sequence[Line]) -> str:
    sentences = []
    for line in lines:
        known = [point for point in line.points if math.isfinite(point.y)]
        if line.read and known:
            ends = (f"{format_number(point.y)} at step {point.x:.0f}" for point in (known[0], known[-1]))
            sentences.append(f"{line.name} from {' to '.join(ends)}")
    return f"{title}: " + ("; ".join(sentences) or "no values")


def bars(rows: Iterable[tuple[str, float, str]]) -> Html:
    """Draw horizontal bars: (name, length from 0 to 1, note behind the bar)."""
    drawn = []
    for name, share, note in rows:
        track = tag("span", tag("span", style=f"width:{100 * share:.2f}%"), class_="track")
        drawn.append(tag("div", tag("span", name, class_="name"), track, tag("span", note, class_="note"), class_="bar"))
    return tag("div", drawn, class_="bars")


def average_points(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Average consecutive points, so that at most ``most`` points remain. Points without a value do not enter the mean."""
    return [_mean(part) for part in _parts(points, most)]


def average_with_envelope(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Average consecutive points, with their smallest and largest value as the band, so that no spike is lost."""
    thinned = []
    for part in _parts(points, most):
        values = [point.y for point in part if math.isfinite(point.y)]
        mean = _mean(part)
        thinned.append(mean._replace(low=min(values), high=max(values)) if len(values) > 1 else mean)
    return thinned


def running_mean(points: Sequence[Point], width: int) -> list[Point]:
    """The mean of the last ``width`` points up to each point; NaN for the first ``width`` - 1 points."""
    smooth = []
    for end, point in enumerate(points, start=1):
        window = [earlier.y for earlier in points[max(0, end - width) : end] if math.isfinite(earlier.y)]
        smooth.append(Point(point.x, math.fsum(window) / len(window) if end >= width and window else math.nan))
    return smooth


def axis_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return about ``about`` round numbers within the range, whose spacing is 1, 2 or 5 times a power of ten."""
    assert high > low, (low, high)
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    choices = [
        [number * gap for number in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]
        for gap in (factor * power for factor in (0.5, 1, 2, 5, 10))
    ]
    best = min(choices, key=lambda choice: abs(len(choice) - about))
    return [float(f"{tick:.12g}") for tick in best]


def padded_range(values: Sequence[float], *, share: float = 0.06) -> tuple[float, float]:
    """Return a range that contains the values with a margin: 0.5 to 1.5 times a constant, and 0 to 1 for no values or zeros."""
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return (0.0, 1.0) if high == 0 else (min(0.5 * low, 1.5 * low), max(0.5 * high, 1.5 * high))
    room = share * (high - low)
    # A quantity that is never negative gets no negative axis.
    return (low - room if low < 0 else max(0.0, low - room)), high + room


def _mean(part: Sequence[Point]) -> Point:
    x = math.fsum(point.x for point in part) / len(part)
    known = [point for point in part if math.isfinite(point.y)]
    if not known:
        return Point(x, math.nan)
    return Point(x, math.fsum(point.y for point in known) / len(known))


def _parts(points: Sequence[Point], most: int) -> list[Sequence[Point]]:
    size = max(1, math.ceil(len(points) / most))
    return [points[start : start + size] for start in range(0, len(points), size)]


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


def reward_section(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], summary: Summary | None, *, split: str
) -> Html | None:
    """Draw the training reward and the evaluations, in one chart if their scales match, otherwise in two; None without values.
    ``split``: how to call the evaluation tasks, for example "held-out"."""
    raw = [Point(line["step"], number(line.get("reward/mean"))) for line in metrics]
    column = headline_column(evals, summary)
    heldout = heldout_points(evals, column=column) if column else []
    has_reward = any(math.isfinite(point.y) for point in raw)
    if not has_reward and not heldout:
        return None
    last_step = max([int(line["step"]) for line in metrics] + [int(line["step"]) for line in evals])
    phases = [
        (int(line["step"]) - 1, str(line["phase"]))
        for earlier, line in zip([None, *metrics], metrics, strict=False)
        if earlier is None or earlier["phase"] != line["phase"]
    ]
    legend, training, levels = [], [], []
    marks = [Line(f"{split} {column}", "held", heldout)] if heldout else []
    if has_reward:
        thin = average_points(raw)
        smooth = running_mean(thin, _width(thin))
        training = [Line("training reward", "train", thin), Line("running mean", "train smooth", smooth, read=False)]
        legend.append(("train", "training reward: mean of each step's samples"))
        if any(math.isfinite(point.y) for point in smooth):
            legend.append(("train smooth", f"mean of the last {_width(raw)} steps"))
    if marks:
        last = [line for line in evals if line["split"] == evals[0]["split"]][-1]["table"]
        row = last.get(HEADLINE_ROW, last.get("all", {}))
        legend.append(("held", f"{marks[0].name} of {row.get('n', '?')} tasks: without exploration noise, bars 95 %"))
    # Levels are drawn only if the summary and the points are about the same tasks.
    if summary and heldout and column == summary.column and math.isclose(heldout[0].y, summary.before, rel_tol=1e-4):
        levels = [] if summary.ceiling is None else [Level("ceiling", summary.ceiling)]
        if summary.best_of_k is not None:
            levels.append(Level(f"best of {summary.k or 'k'}, base", summary.best_of_k, label_below=True))
    one_chart = not training or not marks or _same_scale(raw, heldout)
    charts = [(training, marks, levels)] if one_chart else [(training, [], []), ([], marks, levels)]
    shown = phases if len(phases) > 1 else []
    drawn = [
        draw("Reward over steps", lines, last_step, marks=dots, levels=rules, boundaries=shown, tall=True)
        for lines, dots, rules in charts
    ]
    entries = [tag("li", tag("span", class_=f"swatch {style}"), words) for style, words in legend]
    return tag("div", tag("ul", entries, class_="legend"), drawn)


def _width(points: Sequence[Point]) -> int:
    """The number of points in the running mean: a twentieth of the run, at least 5."""
    return max(5, len(points) // 20)


def _same_scale(one: Sequence[Point], other: Sequence[Point]) -> bool:
    """Whether both can share an axis without flattening either: their gap is at most the sum of their ranges."""
    (low, high), (other_low, other_high) = (
        (min(values), max(values)) for values in ([v for p in points for v in p.span] or [0.0] for points in (one, other))
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
    points = [Point(line["step"], number(line.get(name))) for line in metrics]
    known = [point for point in points if math.isfinite(point.y)]
    short, thin = name.rpartition("/")[2], average_with_envelope(points, 160)
    smooth = running_mean(thin, _width(thin))
    smoothed = any(math.isfinite(point.y) for point in smooth)
    lines = [Line(short, "plain faint" if smoothed else "plain", thin), Line("running mean", "plain smooth", smooth, read=False)]
    latest = format_number(known[-1].y) if known else "no value"
    note = (SIGNALS | WATCHED | NOTES).get(name)
    words = (
        tag("span", name, class_="name"),
        tag("span", latest, class_="latest"),
        tag("span", note, class_="note") if note else None,
    )
    return tag("figure", tag("figcaption", *words), draw(name, lines, int(metrics[-1]["step"])), class_="small")


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
