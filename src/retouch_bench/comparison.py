"""Compares two results of a suite: paired differences with intervals, and a page of the items that differ most."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from retouch.records import files
from retouch_bench.kinds import find_suite
from retouch_bench.results import (
    ALL,
    RESULT,
    BenchmarkResult,
    ImageRow,
    item_values,
    measured,
    resample_counts,
    scored_items,
    shown_difference,
)
from retouch_bench.suite import Suite, SuiteItem
from retouch_view.report.markup import Html, join, scrolled, tag
from retouch_view.report.page import html_page
from retouch_view.report.tables import shown

SCORES = "scores"
log = logging.getLogger("retouch")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of results A and B. ``about``: the differences B - A, as JSON. ``page``: the path of the HTML page."""

    about: Mapping[str, Any]
    page: Path

    def __str__(self) -> str:
        lines = [
            f"{self.about['title']}: {self.about['b']} minus {self.about['a']}, paired over {self.about['items']} items",
            "",
            "| | n | column | A | B | B - A | 95 % interval | |",
            "| --- | ---: | --- | ---: | ---: | ---: | --- | --- |",
        ]
        for name, cells in self.about["table"].items():
            for column, cell in cells.items():
                numbers = " | ".join(shown_difference(cell))
                lines.append(f"| {name} | {cell['n']} | {column} | {numbers} | {'differs' if cell['differs'] else ''} |")
        return "\n".join(lines)


def compare(
    first: str | Path, second: str | Path, *, name: str | None = None, out: str | Path | None = None, top: int = 24
) -> Comparison:
    """Compare two results of one suite with the same scorer: B - A of every column, over the items that have a score in both.

    ``first`` (A) and ``second`` (B): the ``--out`` folders of the results, or folders of scores in them. ``name``: which scores to
    compare, if a folder has several. ``out``: folder for the page; the default is the folder of the scores of B. ``top``: the
    number of items on the page; those that differ most in the headline are chosen.

    Raises ValueError if a result is missing, the suite, its options, the judge, the headline or the prompt of an item differ, or
    no item is in both.
    """
    a, b = (BenchmarkResult.read(_scores(Path(each), name)) for each in (first, second))
    for key in ("suite", "judge", "headline"):
        if a.about[key] != b.about[key]:
            raise ValueError(f"the results cannot be compared: {key} is {a.about[key]} in {first} and {b.about[key]} in {second}")
    suite = find_suite(a.about["suite"]["name"], {key: value for key, value in a.about["suite"].items() if key != "name"})
    items, cells, values = compared(suite, a, b)
    table = {ALL: cells}
    categories = sorted({item.category for item in items if item.category})
    for category in categories if len(categories) > 1 else ():
        chosen = [index for index, item in enumerate(items) if item.category == category]
        part = [{column: each[chosen] for column, each in side.items()} for side in values]
        table[category] = differences(suite, [items[index] for index in chosen], *part)
    about = {
        "title": a.about["title"],
        "suite": a.about["suite"],
        "judge": a.about["judge"],
        "a": _label(a, first),
        "b": _label(b, second),
        "headline": a.about["headline"],
        "items": len(items),
        "table": table,
    }
    folder = b.folder if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / "compare.html", about, suite, a, b, values=values, items=items, top=top)
    files.write_json(folder / "compare.json", about)
    return Comparison(about, folder / "compare.html")


def compared(
    suite: Suite, a: BenchmarkResult, b: BenchmarkResult
) -> tuple[list[SuiteItem], dict[str, dict[str, Any]], list[dict[str, Float[ndarray, " n"]]]]:
    """Return the items that both results have, the ``differences`` over them, and the values of A and of B by column."""
    others = {item.id: item for item in b.items}
    items = [item for item in a.items if item.id in others]
    for item in items:
        other = others[item.id]
        if (item.prompt, item.later) != (other.prompt, other.later):
            raise ValueError(
                f"the results cannot be compared, because they are of different data: item {item.id!r} has the prompt "
                f"{item.prompt!r:.80} in {a.folder} and {other.prompt!r:.80} in {b.folder}"
            )
    if not items:
        raise ValueError(f"{a.folder} and {b.folder} have no item in common")
    ids = {item.id for item in items}
    columns = list(a.rows[0].scores)
    values = [item_values(items, [row for row in each.rows if row.item in ids], columns) for each in (a, b)]
    return items, differences(suite, items, *values), values


def differences(
    suite: Suite, items: Sequence[SuiteItem], a: Mapping[str, Float[ndarray, " n"]], b: Mapping[str, Float[ndarray, " n"]]
) -> dict[str, dict[str, Any]]:
    """Return for each column ``a``, ``b``, ``difference`` with its interval, ``differs`` (the interval excludes 0) and ``n``. Both
    results are aggregated over the same resamples of items. An item without a score in one result is left out of both."""
    both = {name: np.where(np.isnan(a[name]) | np.isnan(b[name]), np.nan, 0.0) for name in a}
    sides = [{name: side[name] + both[name] for name in a} for side in (a, b)]
    clusters = [item.cluster for item in items]
    once, counts = np.ones((1, len(items))), resample_counts(clusters)
    (one_a, one_b), (many_a, many_b) = ([suite.headline(items, side, weights) for side in sides] for weights in (once, counts))
    cells = {}
    for name in one_a:
        cell = measured(clusters, scored_items(both, name), many_b[name] - many_a[name])
        before, after, low = float(one_a[name][0]), float(one_b[name][0]), cell["low"]
        differs = low is not None and (low > 0 or cell["high"] < 0)
        cells[name] = {"a": before, "b": after, "difference": after - before, **cell, "differs": differs, "n": cell.pop("n")}
    return cells


def _scores(folder: Path, name: str | None) -> Path:
    """Find the folder with the result of one scorer. Raises ValueError if there is none, or several and no ``name``."""
    if name is None and (folder / RESULT).is_file():
        return folder
    found = sorted(path.parent for path in (folder / SCORES).glob(f"{name or '*'}/{RESULT}"))
    if not found:
        missing = f"{folder}: no result{f' called {name}' if name else ''} there; name the --out folder of a benchmark"
        if (folder / "recipe.json").is_file():
            missing += f". This is the folder of a run: `retouch bench SUITE --model {folder}` measures it"
        raise ValueError(missing)
    if len(found) > 1:
        raise ValueError(f"{folder} has several results: {', '.join(path.name for path in found)}; choose one with --name")
    return found[0]


def _label(result: BenchmarkResult, given: str | Path) -> str:
    lora = result.about["model"].get("lora")
    model = result.about["model"]["model"]
    return f"{model} with {lora['path']}" if lora else f"{model} ({given})"


def write_page(
    path: Path,
    about: Mapping[str, Any],
    suite: Suite,
    a: BenchmarkResult,
    b: BenchmarkResult,
    *,
    values: Sequence[Mapping[str, Float[ndarray, " n"]]],
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
        source = _sources(suite, a.about.get("data"), Path(folder) / "source.png")
        lower = column in b.about.get("lower_is_better", ())
        cards = [_card([side[items[index].id] for side in rows], source, column, change[index], lower=lower) for index in order]
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
    files.write_atomic(path, f"<!doctype html>\n{page}\n".encode())


def _table(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Html:
    head = tag("tr", *(tag("th", word) for word in ("", "n", "column", "A", "B", "B - A", "95 % interval")))
    lines = []
    for name, cells in table.items():
        for column, cell in cells.items():
            a, b, change, between = shown_difference(cell)
            words = (name, str(cell["n"]), column, a, b, tag("b", change) if cell["differs"] else change, between)
            lines.append(tag("tr", *(tag("td", text) for text in words)))
    return scrolled(head, lines)


def _sources(suite: Suite, data: str | None, path: Path) -> Callable[[ImageRow], Path | None]:
    """Return what writes the source image of a row to ``path``, if the data of the suite still exist."""
    items: dict[str, SuiteItem] = {}
    if suite.task == "editing" and (data is not None or not suite.needs_data):
        try:
            items = {item.id: item for item in suite.items(None if data is None else Path(data))[0]}
        except ValueError as error:
            log.warning("the comparison page has no source images: %s", error)

    def source(row: ImageRow) -> Path | None:
        try:
            images = suite.task_for(items[row.item]).images if row.item in items else ()
        except ValueError:
            return None
        if not images:
            return None
        images[0].save(path)
        return path

    return source


def _card(
    rows: Sequence[ImageRow], source_of: Callable[[ImageRow], Path | None], column: str, change: float, *, lower: bool
) -> Html:
    source = source_of(rows[0])
    pictures = [] if source is None else [shown("source", source, None)]
    for title, row in zip("AB", rows, strict=True):
        value = row.scores[column]
        score = tag("b", "no score" if math.isnan(value) else f"{value:.3g}")
        pictures.append(shown(title, Path(row.image) if row.image else None, score, style="after" if title == "B" else ""))
    direction = "flat" if not abs(change) > 0 else "good" if (change < 0) == lower else "bad"
    gain = tag("span", "no score" if math.isnan(change) else f"{change:+.3g}", class_=f"change {direction}")
    tags = tag("p", gain, tag("span", rows[0].category, class_="tag"), class_="tags")
    prompt = tag("p", rows[0].prompt, class_="instruction", dir="auto")
    return tag("article", prompt, tag("div", pictures, class_="row"), tags, class_="card")
