"""The HTML page of an audit: its lines, its ladder and the images of one item, in one file that works offline."""

import math
from collections.abc import Iterable
from pathlib import Path

from retouch.records.files import png, write_atomic
from retouch_judge.audit import JudgeAudit
from retouch_judge.audit_findings import AuditLine
from retouch_judge.audit_ladders import Item
from retouch_view.report.charts import bars
from retouch_view.report.markup import SMALL, Html, embedded, format_score, join, scrolled, tag
from retouch_view.report.page import html_page

_STYLES = {"pass": "good", "fail": "bad", "warning": "bad"}
_SIGNS = {"pass": "\u2713 ", "fail": "\u2717 ", "warning": "! "}


def write_page(audit: JudgeAudit, example: Item) -> Path:
    """Write ``audit.html`` into the audit's folder and return its path. ``example``: the item whose images are shown."""
    header = tag(
        "header",
        tag("p", "Retouch \u00b7 audit of a judge", class_="kicker"),
        tag("h1", f"{audit.judge}, {audit.scored}"),
        tag("p", f"The judge {audit.headline}.", class_="verdict"),
        [tag("p", sentence, class_="context") for sentence in audit.summary],
    )
    ladder = bars((f"{rung.name} ({rung.truth:.3g})", rung.mean, _interval(rung.mean, rung.low, rung.high)) for rung in audit.rungs)
    images = [
        (probe.name, embedded(png(probe.sample.image.convert("RGB")), words=probe.name, edge=SMALL))
        for probe in (*example.rungs, *example.probes)
        if probe.sample.image
    ]
    figures = [tag("figure", image, tag("figcaption", name), class_="shown") for name, image in images]
    strip = tag("div", figures, class_="strip images")
    main = [
        _section("Lines", _table(audit.lines), f"{audit.items} items, each rung scored {audit.repeats} times."),
        _section("Ladder", ladder, "Mean scores as shares of the judge's range, with 95 % intervals; the truth in brackets."),
        _section("Images of one item", strip, example.rungs[0].sample.task.instruction),
    ]
    path = audit.folder / "audit.html"
    write_atomic(path, f"<!doctype html>\n{html_page(audit.judge, header, join(main))}\n".encode())
    return path


def _section(title: str, content: Html, note: str) -> Html:
    return tag("section", tag("h2", title), tag("p", note, class_="quiet"), content)


def _table(lines: Iterable[AuditLine]) -> Html:
    rows = [
        tag(
            "tr",
            tag("td", tag("span", f"{_SIGNS.get(line.status, '')}{line.status}", class_=_STYLES.get(line.status, "quiet"))),
            tag("th", line.name, scope="row"),
            tag("td", _interval(line.measured, line.low, line.high), class_="number"),
            tag("td", line.why, class_="words"),
            tag("td", line.thresholds, class_="words"),
        )
        for line in lines
    ]
    head = tag("tr", [tag("th", name, scope="col") for name in ("", "line", "measured (95 %)", "what it says", "thresholds")])
    return scrolled(head, rows, style="checks")


def _interval(mean: float, low: float, high: float) -> str:
    if math.isnan(low):
        return format_score(mean, 3)
    return f"{format_score(mean, 3)} ({format_score(low, 3)} to {format_score(high, 3)})"
