"""Line charts and bars as inline SVG.

The SVG stretches to the available width. Strokes keep their width, and all text is HTML on top of it, so that it stays readable on
a phone. Colours are CSS classes, so that one chart works on light and dark pages.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from retouch_view.report.markup import Html, tag
from retouch_view.report.numbers import format_number, tick_label
from retouch_view.report.series import Point, axis_ticks, integer_ticks, padded_range

SIZE = 1000.0


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


@dataclass(frozen=True, slots=True)
class Chart:
    """The content of a chart. ``marks``: points with intervals. ``boundaries``: (step, name of the phase that begins there)."""

    title: str
    lines: Sequence[Line]
    last_step: int
    marks: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    boundaries: Sequence[tuple[int, str]] = ()
    tall: bool = False
    tick_count: int = field(default=3)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to SVG coordinates."""

    last_step: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return SIZE * step / self.last_step

    def y(self, value: float) -> float:
        return SIZE * (self.high - value) / (self.high - self.low)


def draw(chart: Chart) -> Html:
    """Draw the chart, without its title."""
    drawn = [*chart.lines, *chart.marks]
    values = [value for line in drawn for point in line.points for value in point.span]
    low, high = padded_range([*values, *(level.y for level in chart.levels)])
    frame = _Frame(max(1, chart.last_step), low, high)
    y_ticks = axis_ticks(low, high, chart.tick_count)
    x_ticks = integer_ticks(frame.last_step, 6 if chart.tall else 3)
    parts: list[Html] = [_rule(frame, tick) for tick in y_ticks]
    parts += [_boundary(frame, step) for step, _ in chart.boundaries if step > 0]
    parts += [_rule(frame, level.y, "level") for level in chart.levels]
    parts += [_band(frame, line) for line in chart.lines]
    parts += [draw_line(frame, line) for line in chart.lines for draw_line in (_curve, _isolated_points)]
    parts += [piece for line in chart.marks for piece in _marks(frame, line)]
    svg = tag(
        "svg", parts, viewBox=f"0 0 {SIZE:g} {SIZE:g}", preserveAspectRatio="none", role="img", aria_label=_description(chart)
    )
    area = tag(
        "div", svg, _level_labels(frame, chart), _boundary_labels(frame, chart), class_="area", data_hover=_tooltips(frame, drawn)
    )
    gap = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else high - low
    y_axis = tag(
        "div", [tag("span", tick_label(tick, gap), style=f"top:{_percent(frame.y(tick))}") for tick in y_ticks], class_="y"
    )
    x_axis = tag(
        "div", [tag("span", format_number(int(tick)), style=f"left:{_percent(frame.x(tick))}") for tick in x_ticks], class_="x"
    )
    return tag("div", y_axis, area, x_axis, class_="plot tall" if chart.tall else "plot")


def bars(rows: Iterable[tuple[str, float, str]]) -> Html:
    """Draw horizontal bars: (name, length from 0 to 1, note behind the bar)."""
    return tag(
        "div",
        [
            tag(
                "div",
                tag("span", name, class_="name"),
                tag("span", tag("span", style=f"width:{100 * share:.2f}%"), class_="track"),
                tag("span", note, class_="note"),
                class_="bar",
            )
            for name, share, note in rows
        ],
        class_="bars",
    )


def _percent(coordinate: float) -> str:
    return f"{100 * coordinate / SIZE:.2f}%"


def _at(x: float, y: float) -> str:
    return f"{x:.1f} {y:.1f}"


def _rule(frame: _Frame, value: float, style: str = "rule") -> Html:
    return tag("path", d=f"M{_at(0, frame.y(value))}H{SIZE:g}", class_=style)


def _boundary(frame: _Frame, step: int) -> Html:
    return tag("path", d=f"M{_at(frame.x(step), 0)}V{SIZE:g}", class_="boundary")


def _segments(points: Sequence[Point]) -> list[list[Point]]:
    """Split the points into segments at missing values."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.y):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _curve(frame: _Frame, line: Line) -> Html:
    paths = []
    for run in _segments(line.points):
        paths.append("M" + "L".join(_at(frame.x(point.x), frame.y(point.y)) for point in run))
    return tag("path", d="".join(paths), class_=f"line {line.style}")


def _isolated_points(frame: _Frame, line: Line) -> Html:
    """Draw each value between two missing values as a dot, because a line would not show it."""
    lone = [run[0] for run in _segments(line.points) if len(run) == 1]
    return tag("path", d="".join(f"M{_at(frame.x(point.x), frame.y(point.y))}h0" for point in lone), class_=f"lone {line.style}")


def _band(frame: _Frame, line: Line) -> Html:
    paths = []
    for run in _segments(line.points):
        sides = [point for point in run if math.isfinite(point.low) and math.isfinite(point.high)]
        if sides:
            top = [_at(frame.x(point.x), frame.y(point.high)) for point in sides]
            bottom = [_at(frame.x(point.x), frame.y(point.low)) for point in reversed(sides)]
            paths.append("M" + "L".join(top + bottom) + "Z")
    return tag("path", d="".join(paths), class_=f"band {line.style}")


def _marks(frame: _Frame, line: Line) -> list[Html]:
    """Draw intervals as vertical lines and values as dots (lines of length 0, because their round ends are not stretched)."""
    known = [point for point in line.points if math.isfinite(point.y)]
    intervals = "".join(
        f"M{_at(frame.x(point.x), frame.y(point.low))}V{frame.y(point.high):.1f}"
        for point in known
        if math.isfinite(point.low) and math.isfinite(point.high)
    )
    dots = "".join(f"M{_at(frame.x(point.x), frame.y(point.y))}h0" for point in known)
    trail = "M" + "L".join(_at(frame.x(point.x), frame.y(point.y)) for point in known) if known else ""
    styles = (("trail", trail), ("interval", intervals), ("dot", dots))
    return [tag("path", d=path, class_=f"{style} {line.style}") for style, path in styles]


def _level_labels(frame: _Frame, chart: Chart) -> list[Html]:
    return [
        tag(
            "span",
            f"{level.name} {format_number(level.y)}",
            class_="level-label below" if level.label_below else "level-label",
            style=f"top:{_percent(frame.y(level.y))}",
        )
        for level in chart.levels
    ]


def _boundary_labels(frame: _Frame, chart: Chart) -> list[Html]:
    ends = [*(step for step, _ in chart.boundaries[1:]), frame.last_step]
    return [
        tag("span", name, class_="phase-label", style=f"left:{_percent(frame.x(step))};max-width:{_percent(frame.x(end - step))}")
        for (step, name), end in zip(chart.boundaries, ends, strict=False)
    ]


def _tooltips(frame: _Frame, lines: Sequence[Line]) -> str:
    """The tooltips as JSON: [position from 0 to 1, text] for each step with a value."""
    rows: dict[float, list[str]] = {}
    for line in lines:
        for point in line.points:
            if line.read and math.isfinite(point.y):
                rows.setdefault(point.x, []).append(f"{line.name} {_with_band(point)}")
    return json.dumps([[round(x / frame.last_step, 4), "\n".join([f"step {x:.0f}", *rows[x]])] for x in sorted(rows)])


def _with_band(point: Point) -> str:
    band = (
        f" ({format_number(point.low)} to {format_number(point.high)})"
        if math.isfinite(point.low) and point.low < point.high
        else ""
    )
    return format_number(point.y) + band


def _description(chart: Chart) -> str:
    """Describe the chart in words, for its alternative text."""
    sentences = []
    for line in (*chart.lines, *chart.marks):
        known = [point for point in line.points if math.isfinite(point.y)]
        if line.read and known:
            first, last = known[0], known[-1]
            ends = (f"{format_number(point.y)} at step {point.x:.0f}" for point in (first, last))
            sentences.append(f"{line.name} from {' to '.join(ends)}")
    return f"{chart.title}: " + ("; ".join(sentences) or "no values")
