"""Line charts and bars as inline SVG.

A chart's SVG is stretched to the width it gets; strokes keep their width and every word is HTML laid over it, so that text stays
readable on a phone. Colours are CSS classes, so that one chart serves light and dark pages.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from retouch.report.markup import Html, tag
from retouch.report.numbers import short, tick_label
from retouch.report.series import Point, padded_range, ticks, whole_ticks

SIZE = 1000.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line with an optional band; ``style`` is its CSS class, ``name`` what the reading under the pointer calls it."""

    name: str
    style: str
    points: Sequence[Point]
    read: bool = True


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line with a label on it, below it if ``below``."""

    name: str
    y: float
    below: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows. ``marks`` are points with intervals; ``boundaries`` are (step, name of the phase that begins)."""

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
    """From data to the SVG's coordinates."""

    last_step: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return SIZE * step / self.last_step

    def y(self, value: float) -> float:
        return SIZE * (self.high - value) / (self.high - self.low)


def draw(chart: Chart) -> Html:
    """The chart, without its title."""
    drawn = [*chart.lines, *chart.marks]
    values = [value for line in drawn for point in line.points for value in point.span]
    low, high = padded_range([*values, *(level.y for level in chart.levels)])
    frame = _Frame(max(1, chart.last_step), low, high)
    y_ticks = ticks(low, high, chart.tick_count)
    x_ticks = whole_ticks(frame.last_step, 6 if chart.tall else 3)
    parts: list[Html] = [_rule(frame, tick) for tick in y_ticks]
    parts += [_boundary(frame, step) for step, _ in chart.boundaries if step > 0]
    parts += [_rule(frame, level.y, "level") for level in chart.levels]
    parts += [_band(frame, line) for line in chart.lines]
    parts += [draw_line(frame, line) for line in chart.lines for draw_line in (_curve, _lone)]
    parts += [piece for line in chart.marks for piece in _marks(frame, line)]
    svg = tag("svg", parts, viewBox=f"0 0 {SIZE:g} {SIZE:g}", preserveAspectRatio="none", role="img", aria_label=_spoken(chart))
    area = tag(
        "div", svg, _level_labels(frame, chart), _boundary_labels(frame, chart), class_="area", data_hover=_readings(frame, drawn)
    )
    gap = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else high - low
    y_axis = tag("div", [tag("span", tick_label(tick, gap), style=f"top:{_share(frame.y(tick))}") for tick in y_ticks], class_="y")
    x_axis = tag("div", [tag("span", short(int(tick)), style=f"left:{_share(frame.x(tick))}") for tick in x_ticks], class_="x")
    return tag("div", y_axis, area, x_axis, class_="plot tall" if chart.tall else "plot")


def bars(rows: Iterable[tuple[str, float, str]]) -> Html:
    """Horizontal bars: (name, share from 0 to 1, what is written behind it)."""
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


def _share(place: float) -> str:
    return f"{100 * place / SIZE:.2f}%"


def _at(x: float, y: float) -> str:
    return f"{x:.1f} {y:.1f}"


def _rule(frame: _Frame, value: float, style: str = "rule") -> Html:
    return tag("path", d=f"M{_at(0, frame.y(value))}H{SIZE:g}", class_=style)


def _boundary(frame: _Frame, step: int) -> Html:
    return tag("path", d=f"M{_at(frame.x(step), 0)}V{SIZE:g}", class_="boundary")


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches of points without a missing value between them."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.y):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _curve(frame: _Frame, line: Line) -> Html:
    paths = []
    for run in _runs(line.points):
        paths.append("M" + "L".join(_at(frame.x(point.x), frame.y(point.y)) for point in run))
    return tag("path", d="".join(paths), class_=f"line {line.style}")


def _lone(frame: _Frame, line: Line) -> Html:
    """Values between two missing ones, which no line would show, as dots."""
    lone = [run[0] for run in _runs(line.points) if len(run) == 1]
    return tag("path", d="".join(f"M{_at(frame.x(point.x), frame.y(point.y))}h0" for point in lone), class_=f"lone {line.style}")


def _band(frame: _Frame, line: Line) -> Html:
    paths = []
    for run in _runs(line.points):
        sides = [point for point in run if math.isfinite(point.low) and math.isfinite(point.high)]
        if sides:
            top = [_at(frame.x(point.x), frame.y(point.high)) for point in sides]
            bottom = [_at(frame.x(point.x), frame.y(point.low)) for point in reversed(sides)]
            paths.append("M" + "L".join(top + bottom) + "Z")
    return tag("path", d="".join(paths), class_=f"band {line.style}")


def _marks(frame: _Frame, line: Line) -> list[Html]:
    """Intervals as upright lines and values as dots (lines without length, whose round ends are not stretched)."""
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
            f"{level.name} {short(level.y)}",
            class_="level-label below" if level.below else "level-label",
            style=f"top:{_share(frame.y(level.y))}",
        )
        for level in chart.levels
    ]


def _boundary_labels(frame: _Frame, chart: Chart) -> list[Html]:
    ends = [*(step for step, _ in chart.boundaries[1:]), frame.last_step]
    return [
        tag("span", name, class_="phase-label", style=f"left:{_share(frame.x(step))};max-width:{_share(frame.x(end - step))}")
        for (step, name), end in zip(chart.boundaries, ends, strict=False)
    ]


def _readings(frame: _Frame, lines: Sequence[Line]) -> str:
    """What is shown under the pointer: JSON of [place from 0 to 1, text] for each step that any line has."""
    rows: dict[float, list[str]] = {}
    for line in lines:
        for point in line.points:
            if line.read and math.isfinite(point.y):
                rows.setdefault(point.x, []).append(f"{line.name} {_with_band(point)}")
    return json.dumps([[round(x / frame.last_step, 4), "\n".join([f"step {x:.0f}", *rows[x]])] for x in sorted(rows)])


def _with_band(point: Point) -> str:
    band = f" ({short(point.low)} to {short(point.high)})" if math.isfinite(point.low) and point.low < point.high else ""
    return short(point.y) + band


def _spoken(chart: Chart) -> str:
    """The chart in words, for those who cannot see it."""
    said = []
    for line in (*chart.lines, *chart.marks):
        known = [point for point in line.points if math.isfinite(point.y)]
        if line.read and known:
            said.append(
                f"{line.name} from {short(known[0].y)} at step {known[0].x:.0f} to {short(known[-1].y)} at step {known[-1].x:.0f}"
            )
    return f"{chart.title}: " + ("; ".join(said) or "no values")
