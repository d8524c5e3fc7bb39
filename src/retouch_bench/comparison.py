"""Compares two results of a suite: paired differences with intervals, and a page of the items that differ most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from retouch.core.intervals import cluster_numbers
from retouch.records import files
from retouch_bench.kinds import find_suite
from retouch_bench.results import ALL, RESULT, BenchmarkResult, item_values, scored_items, shown_difference
from retouch_bench.statistics import bootstrap_interval, resample_counts
from retouch_bench.suite import Suite, SuiteItem

SCORES = "scores"


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
        "title": suite.title,
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
    from retouch_bench.comparison_page import write_page

    found = Comparison(about, folder / "compare.html")
    write_page(found.page, about, suite, a, b, values=values, items=items, top=top)
    files.write_json(folder / "compare.json", about)
    return found


def compared(
    suite: Suite, a: BenchmarkResult, b: BenchmarkResult
) -> tuple[list[SuiteItem], dict[str, dict[str, Any]], list[dict[str, Float[ndarray, " n"]]]]:
    """Return the items that both results have, the ``differences`` over them, and the values of A and of B by column."""
    items = _common_items(a, b)
    if not items:
        raise ValueError(f"{a.folder} and {b.folder} have no item in common")
    values = [item_values(items, _of(items, each), list(a.rows[0].scores)) for each in (a, b)]
    return items, differences(suite, items, *values), values


def differences(
    suite: Suite,
    items: Sequence[SuiteItem],
    a: Mapping[str, Float[ndarray, " n"]],
    b: Mapping[str, Float[ndarray, " n"]],
) -> dict[str, dict[str, Any]]:
    """Return for each column ``a``, ``b``, ``difference`` with its interval, ``differs`` (the interval excludes 0) and ``n``.

    Both results are aggregated over the same resamples of items. An item without a score in one result is left out of both.
    """
    both = {name: np.where(np.isnan(a[name]) | np.isnan(b[name]), np.nan, 0.0) for name in a}
    sides = [{name: side[name] + both[name] for name in a} for side in (a, b)]
    clusters = [item.cluster for item in items]
    once, counts = np.ones((1, len(items))), resample_counts(clusters)
    (one_a, one_b), (many_a, many_b) = ([suite.headline(items, side, weights) for side in sides] for weights in (once, counts))
    cells = {}
    for name in one_a:
        known = scored_items(both, name)
        groups = cluster_numbers([cluster for cluster, scored in zip(clusters, known, strict=True) if scored])[1]
        interval = bootstrap_interval(many_b[name] - many_a[name], clusters=groups)
        cells[name] = {
            "a": float(one_a[name][0]),
            "b": float(one_b[name][0]),
            "difference": float(one_b[name][0] - one_a[name][0]),
            "low": None if interval is None else interval.low,
            "high": None if interval is None else interval.high,
            "differs": interval is not None and interval.excludes_zero,
            "n": int(known.sum()),
        }
    return cells


def _common_items(a: BenchmarkResult, b: BenchmarkResult) -> list[SuiteItem]:
    """Return the items that both results have, in the order of A. Raises ValueError if an item has another prompt in B."""
    others = {item.id: item for item in b.items}
    items = [item for item in a.items if item.id in others]
    for item in items:
        other = others[item.id]
        if (item.prompt, item.later) != (other.prompt, other.later):
            raise ValueError(
                f"the results cannot be compared, because they are of different data: item {item.id!r} has the prompt "
                f"{item.prompt!r:.80} in {a.folder} and {other.prompt!r:.80} in {b.folder}"
            )
    return items


def _of(items: Sequence[SuiteItem], result: BenchmarkResult) -> list[Any]:
    ids = {item.id for item in items}
    return [row for row in result.rows if row.item in ids]


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
