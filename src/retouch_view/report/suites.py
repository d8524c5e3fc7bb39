"""The results of the benchmarks that a run makes during training (``eval.suites``), and their alarms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from retouch_view.report.charts import Chart, Line, draw
from retouch_view.report.markup import Html, tag
from retouch_view.report.series import Point

_ALL = "all"


def sections(lines: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Return a section with a chart and a table for each suite (the headline of all items and of each category at each step);
    empty without suites."""
    names = list(dict.fromkeys(line["suite"] for line in lines))
    if not names:
        return []
    note = "Means over items with 95 % intervals, of the policy after each step. The rows are the same as in `retouch bench`."
    tables = [_suite(name, [line for line in lines if line["suite"] == name]) for name in names]
    return [tag("section", tag("h2", "Benchmarks"), tables, tag("p", note, class_="quiet"))]


def _suite(name: str, lines: Sequence[Mapping[str, Any]]) -> Html:
    column = lines[-1]["headline"]
    rows = list(lines[-1]["table"])
    head = tag("tr", tag("th", "step"), *(tag("th", row) for row in rows), tag("th", "missing"))
    body = [
        tag(
            "tr",
            tag("td", str(line["step"])),
            *(tag("td", _cell(line["table"].get(row, {}).get(column))) for row in rows),
            tag("td", str(line["missing"])),
        )
        for line in lines
    ]
    alarms = [f"after step {line['step']}, {line['alarm']}" for line in lines if line["alarm"] is not None]
    warning = tag("p", f"Alarm: {'; '.join(alarms)}.", class_="warning") if alarms else None
    caption = tag("p", tag("b", name), f", {column}", class_="caption")
    table = tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll")
    return tag("div", caption, _chart(name, column, lines), table, warning)


def _chart(name: str, column: str, lines: Sequence[Mapping[str, Any]]) -> Html | None:
    """Draw the headline over the steps with its intervals; None if only step 0 was measured or there is no score."""
    cells = [(int(line["step"]), line["table"].get(_ALL, {}).get(column)) for line in lines]
    points = [
        Point(step, cell["mean"], *(math.nan if cell[end] is None else cell[end] for end in ("low", "high")))
        for step, cell in cells
        if cell is not None and cell["mean"] is not None
    ]
    last = max(step for step, _ in cells)
    if not points or last == 0:
        return None
    return draw(Chart(f"{name}, {column}", [], last, marks=[Line(column, "held", points)]))


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["mean"] is None:
        return "-"
    between = "" if cell["low"] is None else f" ({cell['low']:.2f} to {cell['high']:.2f})"
    return f"{cell['mean']:.2f}{between}"
