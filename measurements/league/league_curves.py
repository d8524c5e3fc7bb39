"""A line chart as SVG: share of the gap over network evaluations or images."""

import math
from collections.abc import Iterator, Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 480, 56, 190, 40, 46
INK, SOFT, LINE = "#1f2937", "#6b7280", "#e5e7eb"
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8e5aa8", "#e08e0b", "#00a0a0", "#5c4033", "#6b7280")
DASHES = ("", "6 4", "2 3")
THIN, FAINT = 1.0, 0.6
"""Width and opacity of the lines without an interval, in a chart in which some lines have one."""
SPACE = 17
"""Smallest vertical distance between two labels, in SVG units."""
BAR_DISTANCE = 9
"""Horizontal distance between two bars, in SVG units."""


def draw(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    unit: str = "network evaluations",
    intervals: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> str:
    """The SVG chart. Each name has a line through its points (x in ``unit``, share of the gap), with a label at the right.

    ``intervals``: for some of the names, points (x, low, high). Several points are drawn as a band, and one as a bar. The lines of
    the other names are thin.
    """
    intervals = intervals or {}
    longest = max(x for points in lines.values() for x, _ in points)
    shares = [y for points in lines.values() for _, y in points]
    shares += [bound for points in intervals.values() for _, *bounds in points for bound in bounds]
    low, high = min(-0.1, math.floor(10 * min(shares)) / 10), max(0.2, math.ceil(10 * max(shares)) / 10)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / longest * (WIDTH - LEFT - RIGHT), TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 22, title, anchor="start", size=14)]
    for tick in range(round(10 * low), round(10 * high) + 1):
        (x1, y), (x2, _) = place(0, tick / 10), place(longest, tick / 10)
        parts += [_line(x1, y, x2, y, SOFT if tick == 0 else LINE), _text(x1 - 8, y + 4, f"{tick / 10:g}", anchor="end")]
    for quarter in range(5):
        x, _ = place(quarter * longest / 4, 0)
        parts.append(_text(x, HEIGHT - 22, f"{quarter * longest / 4000:.1f}k"))
    parts.append(_text(place(longest / 2, 0)[0], HEIGHT - 5, unit))
    styles = {name: (COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)]) for k, name in enumerate(lines)}
    for number, (name, points) in enumerate(intervals.items()):
        lower, upper = [place(x, low) for x, low, _ in points], [place(x, high) for x, _, high in points]
        if len(points) > 1:
            outline = _path([*lower, *reversed(upper)])
            colour = styles[name][0]
            edge = f'stroke="{colour}" stroke-width="0.8" stroke-opacity="0.6"'
            parts.append(f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.07" {edge}/>')
        else:
            parts += _bar(lower[0], upper[0], left=BAR_DISTANCE * number, colour=styles[name][0])
    if intervals:
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 5, "thick lines: band or bar is the 95 % interval", anchor="end", fill=SOFT))
    for name, points in lines.items():
        colour, dash = styles[name]
        path = _path([place(*point) for point in points])
        thin = intervals and name not in intervals
        width = f'stroke-width="{THIN:g}" stroke-opacity="{FAINT:g}"' if thin else 'stroke-width="2"'
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {width} stroke-dasharray="{dash}"/>')
    for name, y in _labels({name: place(*points[-1])[1] for name, points in lines.items()}):
        (x, end), colour = place(*lines[name][-1]), styles[name][0]
        parts += [
            _line(x + 2, end, WIDTH - RIGHT + 14, y - 4, colour),
            _text(WIDTH - RIGHT + 18, y, name, anchor="start", fill=colour),
        ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif">'
    return "\n".join(
        [head, f"<title>{title}</title>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *parts, "</svg>", ""]
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _bar(lower: tuple[float, float], upper: tuple[float, float], *, left: float, colour: str) -> list[str]:
    """A vertical bar with ends, ``left`` SVG units to the left of its x."""
    x = lower[0] - left
    ends = [_line(x - 3, y, x + 3, y, colour) for _, y in (lower, upper)]
    return [_line(x, lower[1], x, upper[1], colour), *ends]


def _labels(ends: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The vertical position of each label. Labels are stacked in the order of the line ends, around the mean of these ends."""
    middle = sum(ends.values()) / len(ends)
    highest = max(TOP, min(middle - SPACE * (len(ends) - 1) / 2, HEIGHT - SPACE * len(ends)))
    for rank, name in enumerate(sorted(ends, key=lambda name: ends[name])):
        yield name, highest + SPACE * rank + 4


def _text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12, fill: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="1"/>'
