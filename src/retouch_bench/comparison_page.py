"""The HTML page of a comparison: the differences, and the items where two results differ most, in the style of the reports."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from retouch.records.files import write_atomic
from retouch_bench.results import BenchmarkResult, ImageRow, shown_difference
from retouch_bench.suite import Suite, SuiteItem
from retouch_view.report.markup import Html, join, picture, tag
from retouch_view.report.page import html_page

log = logging.getLogger("retouch")
Values = Mapping[str, Float[ndarray, " n"]]


def write_page(
    path: Path,
    about: Mapping[str, Any],
    suite: Suite,
    a: BenchmarkResult,
    b: BenchmarkResult,
    *,
    values: Sequence[Values],
    items: Sequence[SuiteItem],
    top: int,
) -> None:
    """Write the page of a comparison, with the ``top`` items that differ most in the headline (or the first column, if the headline
    is only an aggregate)."""
    column = about["headline"] if about["headline"] in values[0] else next(iter(values[0]))
    change = values[1][column] - values[0][column]
    order = np.argsort(-np.abs(np.nan_to_num(change, nan=0.0)), kind="stable")[:top]
    rows = [{row.item: row for row in reversed(result.rows)} for result in (a, b)]
    with tempfile.TemporaryDirectory() as folder:
        sources = _Sources(suite, a.about.get("data"), Path(folder))
        lower = column in b.about.get("lower_is_better", ())
        cards = [_card([side[items[index].id] for side in rows], sources, column, change[index], lower=lower) for index in order]
    header = tag(
        "header",
        tag("p", "Retouch · benchmark comparison", class_="kicker"),
        tag("h1", f"{about['title']}: B minus A"),
        tag("p", f"A: {about['a']}"),
        tag("p", f"B: {about['b']}"),
        tag("p", f"{about['items']} items that both have, scored by {about['judge']['name']}.", class_="quiet"),
    )
    words = f"The {len(cards)} items that differ most in {column}, the largest difference first."
    content = join(
        [
            tag("section", tag("h2", "Differences"), _table(about["table"])),
            tag("section", tag("h2", "Images"), tag("p", words, class_="quiet"), tag("div", cards, class_="cards")),
        ]
    )
    page = html_page(f"{about['title']}: {about['b']} and {about['a']}", header, content)
    write_atomic(path, f"<!doctype html>\n{page}\n".encode())


def _table(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Html:
    head = tag("tr", *(tag("th", word) for word in ("", "n", "column", "A", "B", "B - A", "95 % interval")))
    lines = []
    for name, cells in table.items():
        for column, cell in cells.items():
            a, b, change, between = shown_difference(cell)
            shown = tag("b", change) if cell["differs"] else change
            lines.append(tag("tr", *(tag("td", text) for text in (name, str(cell["n"]), column, a, b, shown, between))))
    return tag("div", tag("table", tag("thead", head), tag("tbody", lines)), class_="scroll")


class _Sources:
    """Loads the source images of items, if the data of the suite still exist, and writes them to ``folder``."""

    def __init__(self, suite: Suite, data: str | None, folder: Path) -> None:
        self._suite, self._folder = suite, folder
        self._items = {}
        if suite.task == "editing" and (data is not None or not suite.needs_data):
            try:
                self._items = {item.id: item for item in suite.items(None if data is None else Path(data))[0]}
            except ValueError as error:
                log.warning("the comparison page has no source images: %s", error)

    def __call__(self, row: ImageRow) -> Path | None:
        if row.item not in self._items:
            return None
        try:
            images = self._suite.task_for(self._items[row.item]).images
        except ValueError:
            return None
        if not images:
            return None
        path = self._folder / "source.png"
        images[0].save(path)
        return path


def _card(rows: Sequence[ImageRow], sources: _Sources, column: str, change: float, *, lower: bool) -> Html:
    source = sources(rows[0])
    shown = [] if source is None else [_shown("source", source, None)]
    for title, row in zip("AB", rows, strict=True):
        value = row.scores[column]
        score = "no score" if math.isnan(value) else f"{value:.3g}"
        shown.append(_shown(title, Path(row.image) if row.image else None, tag("b", score), style="after" if title == "B" else ""))
    direction = "flat" if not abs(change) > 0 else "good" if (change < 0) == lower else "bad"
    tags = tag(
        "p",
        tag("span", "no score" if math.isnan(change) else f"{change:+.3g}", class_=f"change {direction}"),
        tag("span", rows[0].category, class_="tag"),
        class_="tags",
    )
    return tag(
        "article", tag("p", rows[0].prompt, class_="instruction", dir="auto"), tag("div", shown, class_="row"), tags, class_="card"
    )


def _shown(label: str, path: Path | None, scores: Html | None, *, style: str = "") -> Html:
    caption = tag("figcaption", tag("span", label, class_="label"), scores)
    return tag("figure", picture(path, words=label), caption, class_=f"shown {style}".strip())
