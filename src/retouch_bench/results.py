"""The result of a benchmark: a row for each image, and the table of means with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from retouch.core.intervals import bootstrap_interval, cluster_numbers, resamples
from retouch.records import files
from retouch_bench.suite import Suite, SuiteItem

RESULT, ROWS, ITEMS, TABLE = "result.json", "rows.jsonl", "items.jsonl", "table.md"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow:
    """An image of a suite and its scores.

    ``turn``: from 1. ``image``: path of the file, empty if there is none. ``scores``: the columns of the suite, NaN if missing.
    ``reason``: why a score is missing. ``given``: the columns of the reward, from which the suite computed ``scores``.
    """

    item: str
    category: str
    cluster: str
    sample: int
    turn: int
    prompt: str
    image: str
    scores: Mapping[str, float]
    reason: str = ""
    given: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> ImageRow:
        """Create the row from a line of JSON, the inverse of ``dataclasses.asdict``."""
        scores, given = (
            {name: math.nan if value is None else float(value) for name, value in line[key].items()} for key in ("scores", "given")
        )
        return cls(**{**line, "scores": scores, "given": given})


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The stored result of a benchmark. ``folder``: where it is stored. ``about``: what was measured, with the table, as JSON.
    ``rows``: a row for each image. ``items``: the items, without the paths of their images."""

    folder: Path
    about: Mapping[str, Any]
    rows: Sequence[ImageRow]
    items: Sequence[SuiteItem]

    @property
    def table(self) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """Row name to column to ``mean``, ``low``, ``high`` (95 % interval; None below 8 clusters) and ``n`` (scored items)."""
        table: Mapping[str, Mapping[str, Mapping[str, Any]]] = self.about["table"]
        return table

    @property
    def missing(self) -> Sequence[Mapping[str, Any]]:
        """The images without a score, each with the reason."""
        missing: Sequence[Mapping[str, Any]] = self.about["missing"]
        return missing

    @property
    def headline(self) -> float:
        """The headline number of the suite; NaN if no item has a score."""
        mean = self.table[ALL][self.about["headline"]]["mean"]
        return math.nan if mean is None else float(mean)

    def __str__(self) -> str:
        return markdown(self.about)

    def write(self) -> None:
        """Write the rows, the result and the table into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_lines(self.folder / ROWS, [asdict(row) for row in self.rows])
        files.write_lines(self.folder / ITEMS, [{key: getattr(item, key) for key in _ITEM_KEYS} for item in self.items])
        files.write_json(self.folder / RESULT, self.about)
        files.write_atomic(self.folder / TABLE, (str(self) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> BenchmarkResult:
        """Read the result in a folder. Raises ValueError if there is none."""
        if not (folder / RESULT).is_file():
            raise ValueError(f"{folder}: no {RESULT} there; give the --out folder of a benchmark that has ended")
        rows = [ImageRow.from_json(line) for line in files.read_lines(folder / ROWS)]
        items = [SuiteItem(**{**line, "later": tuple(line["later"])}) for line in files.read_lines(folder / ITEMS)]
        return cls(folder, files.read_record(folder / RESULT), rows, items)


_ITEM_KEYS = ("id", "prompt", "later", "category", "text", "cluster", "fields")


def item_values(items: Sequence[SuiteItem], rows: Sequence[ImageRow], columns: Sequence[str]) -> dict[str, Float[ndarray, " n"]]:
    """Return for each column the mean over the scored images of each item, in the order of ``items``; NaN without a score."""
    numbers = {item.id: index for index, item in enumerate(items)}
    sums, counts = np.zeros((len(columns), len(items))), np.zeros((len(columns), len(items)))
    for row in rows:
        values = np.array([row.scores.get(name, math.nan) for name in columns])
        known = ~np.isnan(values)
        sums[known, numbers[row.item]] += values[known]
        counts[known, numbers[row.item]] += 1
    means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    return dict(zip(columns, means, strict=True))


def scored_items(values: Mapping[str, Float[ndarray, " n"]], name: str) -> Bool[ndarray, " n"]:
    """Return which items have a score in a column. For a column that only the headline adds: a score in any column."""
    columns = [values[name]] if name in values else list(values.values())
    known: Bool[ndarray, " n"] = ~np.isnan(np.stack(columns)).all(axis=0)
    return known


def make_table(suite: Suite, items: Sequence[SuiteItem], rows: Sequence[ImageRow]) -> dict[str, dict[str, Any]]:
    """Aggregate every column over all items (row ``all``), over each turn if there are several, and over each category."""
    columns = list(rows[0].scores) if rows else list(suite.columns)
    groups = {ALL: list(rows)}
    turns = sorted({row.turn for row in rows})
    for turn in turns if len(turns) > 1 else ():
        groups[f"turn {turn}"] = [row for row in rows if row.turn == turn]
    categories = sorted({item.category for item in items if item.category})
    for category in categories if len(categories) > 1 else ():
        if chosen := [row for row in rows if row.category == category]:
            groups[category] = chosen
    by_item = {item.id: item for item in items}
    table = {}
    for group, chosen in groups.items():
        members = [by_item[each] for each in dict.fromkeys(row.item for row in chosen)]
        values, clusters = item_values(members, chosen, columns), [item.cluster for item in members]
        means = suite.headline(members, values, np.ones((1, len(members))))
        resampled = suite.headline(members, values, resample_counts(clusters))
        table[group] = {
            name: {"mean": float(mean[0]), **measured(clusters, scored_items(values, name), resampled[name])}
            for name, mean in means.items()
        }
    return table


def measured(clusters: Sequence[str], scored: Bool[ndarray, " n"], resampled: Float[ndarray, " b"]) -> dict[str, Any]:
    """Return ``low`` and ``high`` of an aggregate, from its values in the resamples, and ``n``, the number of ``scored`` items."""
    known = [cluster for cluster, is_known in zip(clusters, scored, strict=True) if is_known]
    interval = bootstrap_interval(resampled, clusters=cluster_numbers(known)[1])
    low, high = interval or (None, None)
    return {"low": low, "high": high, "n": int(scored.sum())}


def missing_images(rows: Sequence[ImageRow], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the images without a score in one of these columns, each with the reason."""
    return [
        {"item": row.item, "sample": row.sample, "turn": row.turn, "columns": absent, "reason": row.reason}
        for row in rows
        if (absent := [name for name in columns if math.isnan(row.scores.get(name, math.nan))])
    ]


def markdown(about: Mapping[str, Any]) -> str:
    """Format the result as a Markdown table, followed by the missing scores and the unusable items."""
    table = about["table"]
    columns = list(table[ALL])
    model, lora = about["model"]["model"], about["model"].get("lora")
    maker = f"{model} with {lora['path']}" if lora else model
    scorer = "its own scorer" if about["judge"]["name"] == "own" else about["judge"]["name"]
    of_all = f" of {about['size']}" if about["size"] > about["items"] else ""
    lines = [
        f"**{about['title']}**, {maker}, scored by {scorer}; {about['items']}{of_all} items, seed {about['seed']}. "
        f"Means and 95 % intervals; `{about['headline']}` is the headline.",
        "",
        f"| | n | {' | '.join(columns)} |",
        f"| --- | ---: |{' ---: |' * len(columns)}",
    ]
    for name, cells in table.items():
        n = max((cell["n"] for cell in cells.values()), default=0)
        lines.append(f"| {name} | {n} | {' | '.join(_cell(cells[column]) for column in columns)} |")
    for key, noun in (("missing", "image"), ("broken", "item")):
        if about[key]:
            first = about[key][0]
            where = first.get("item", first.get("id"))
            count = len(about[key])
            what = "without a score" if key == "missing" else "of the data that cannot be used"
            left_out = f"{count} {noun}{'s' * (count > 1)} {what}, left out"
            lines += ["", f"{left_out}: {where} ({first['reason']})" + ", ..." * (count > 1)]
    return "\n".join(lines)


def _cell(cell: Mapping[str, Any]) -> str:
    mean = cell["mean"]
    if mean is None or math.isnan(mean):
        return "-"
    return f"{mean:.3f}" if cell["low"] is None else f"{mean:.3f} ({cell['low']:.3f} to {cell['high']:.3f})"


def shown_difference(cell: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return A, B, B - A and its interval of a cell of a comparison as text; "-" for what is not known."""
    a, b = ("-" if math.isnan(cell[side]) else f"{cell[side]:.3f}" for side in ("a", "b"))
    difference = "-" if math.isnan(cell["difference"]) else f"{cell['difference']:+.3f}"
    return a, b, difference, "-" if cell["low"] is None else f"{cell['low']:+.3f} to {cell['high']:+.3f}"


def resample_counts(clusters: Sequence[str]) -> Float[ndarray, "b n"]:
    """Return how often each resample counts each item."""
    members, count = cluster_numbers(clusters)
    return resamples(count)[:, members]
