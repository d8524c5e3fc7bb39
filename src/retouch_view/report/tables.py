"""The tables: held-out scores before and after training, the checks before the first step, versions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retouch_view.report.markup import Html, join, tag
from retouch_view.report.numbers import MISSING, decimals_for, format_number, format_score, format_signed

MOST_ROWS = 12  # rows of one tag; a longer table is collapsed
FEWEST_TASKS = 20  # a decline is reported only for rows with at least this many tasks


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One cell: the mean before and after training, with confidence intervals if measured. ``lower``: a lower value is better."""

    before: float | None
    after: float | None
    before_ci: tuple[float, float] | None
    after_ci: tuple[float, float] | None
    decimals: int
    lower: bool = False

    @property
    def apart(self) -> bool:
        """Whether the two intervals do not overlap."""
        if self.before_ci is None or self.after_ci is None:
            return False
        return self.after_ci[0] > self.before_ci[1] or self.after_ci[1] < self.before_ci[0]

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def direction(self) -> str:
        """ "good" or "bad"; "flat" if the change is too small to show in the decimals."""
        if self.change is None or abs(self.change) < 0.5 * 10**-self.decimals:
            return "flat"
        return "good" if (self.change > 0) != self.lower else "bad"


def compare_cell(before: Mapping[str, Any], after: Mapping[str, Any], *, row: str, column: str) -> ComparedCell:
    """Compare the cell of a row and column in two evaluations, with as many decimals as the column needs."""
    return ComparedCell(
        before["table"].get(row, {}).get(column),
        after["table"].get(row, {}).get(column),
        interval(before, row=row, column=column),
        interval(after, row=row, column=column),
        decimals_for(cells.get(column) for line in (before, after) for cells in line["table"].values()),
        lower=column in after.get("lower_is_better", ()),
    )


def interval(line: Mapping[str, Any], *, row: str, column: str) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a mean; None if the evaluation has none."""
    ends = line["ci95"].get(row, {}).get(column)
    return None if ends is None or None in ends else (ends[0], ends[1])


def columns_of(line: Mapping[str, Any]) -> list[str]:
    """Return the columns of an evaluation in their order, without the number of tasks.

    The combined reward is left out if it equals one of the other columns.
    """
    rows = line["table"].values()
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "n"))
    others = [column for column in columns if column != "reward"]
    duplicate = any(all(row.get(column) == row.get("reward") for row in rows) for column in others)
    return others if duplicate else columns


def significant_declines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe every score that declined: its interval after training is entirely worse than its interval before training.

    Only rows with at least ``FEWEST_TASKS`` tasks are compared.
    """
    found = []
    for row, cells in after["table"].items():
        if (cells.get("n") or 0) < FEWEST_TASKS:
            continue
        for column in columns_of(after):
            cell = compare_cell(before, after, row=row, column=column)
            if cell.apart and cell.direction == "bad":
                where = "" if row == "all" else f" ({_row_name(row)})"
                found.append(
                    f"{column}{where} {format_score(cell.before, cell.decimals)} to {format_score(cell.after, cell.decimals)}"
                )
    return found


def heldout_tables(evals: Sequence[Mapping[str, Any]], *, first: str | None, split_name: str) -> list[Html]:
    """Compare the first and the last evaluation of each split, with the column ``first`` in front.

    ``split_name``: the displayed name of the split "heldout". Columns that share a prefix ("success/") get a separate table.
    """
    found = []
    for split in dict.fromkeys(line["split"] for line in evals):
        lines = sorted((line for line in evals if line["split"] == split), key=lambda line: int(line["step"]))
        before, after = lines[0], lines[-1]
        name = split_name if split == "heldout" else str(split)
        families: dict[str, list[str]] = {}
        for column in sorted(columns_of(after), key=lambda column: column != first):
            families.setdefault(column.rpartition("/")[0], []).append(column)
        steps = f"step {before['step']}" + ("" if before is after else f" → step {after['step']}")
        for family, columns in families.items():
            title = f"{name}, {family}" if family else name
            found.append(_heldout(title, steps, before, after, columns))
    return found


def _heldout(title: str, steps: str, before: Mapping[str, Any], after: Mapping[str, Any], columns: Sequence[str]) -> Html:
    groups: dict[str, list[str]] = {}
    for row, cells in after["table"].items():
        if any(cells.get(column) is not None for column in columns):
            groups.setdefault(row.partition("=")[0] if "=" in row else "", []).append(row)
    head = tag(
        "tr",
        tag("th", "", scope="col"),
        tag("th", "tasks", scope="col"),
        [tag("th", column.rpartition("/")[2], scope="col") for column in columns],
    )

    def lines(rows: Sequence[str]) -> list[Html]:
        return [_heldout_row(row, before, after, columns) for row in rows]

    width = str(len(columns) + 2)
    body: list[Html] = []
    folded: list[Html] = []
    for name, rows in groups.items():
        if len(rows) > MOST_ROWS:
            table = tag("table", tag("thead", head), tag("tbody", lines(rows)), class_="scores")
            folded.append(tag("details", tag("summary", f"{name}: {len(rows)} rows"), tag("div", table, class_="scroll")))
        else:
            if name:
                body.append(tag("tr", tag("th", name, colspan=width, scope="colgroup"), class_="group"))
            body += lines(rows)
    caption = tag("p", tag("b", title), f" · {steps}", _without_score(before, after, columns), class_="caption")
    return join(
        [caption, tag("div", tag("table", tag("thead", head), tag("tbody", body), class_="scores"), class_="scroll"), *folded]
    )


def _without_score(before: Mapping[str, Any], after: Mapping[str, Any], columns: Sequence[str]) -> str:
    """For each of the columns, the number of tasks without a score."""
    counts = [line.get("missing", {}) for line in ([after] if before is after else [before, after])]
    made = ""
    for column in columns:
        found = [each.get(column, 0) for each in counts]
        if any(found):
            made += f" · no {column} for {' → '.join(map(str, found))} of {after['table']['all']['n']} tasks"
    return made


def _row_name(row: str) -> str:
    return " ".join(row.split("=", 1)) if "=" in row else row


def _heldout_row(row: str, before: Mapping[str, Any], after: Mapping[str, Any], columns: Sequence[str]) -> Html:
    name = row.split("=", 1)[1] if "=" in row else row
    count = after["table"][row].get("n")
    cells = [_cell(compare_cell(before, after, row=row, column=column), single=before is after) for column in columns]
    return tag("tr", tag("th", name, scope="row"), tag("td", MISSING if count is None else str(count), class_="count"), cells)


def _cell(cell: ComparedCell, *, single: bool) -> Html:
    ends = [("before", cell.before_ci), ("after", cell.after_ci)][1 if single else 0 :]
    title = (
        "; ".join(
            f"{name} 95 %: {format_score(ci[0], cell.decimals)} to {format_score(ci[1], cell.decimals)}"
            for name, ci in ends
            if ci is not None
        )
        or None
    )
    if single:
        return tag("td", format_score(cell.after, cell.decimals), title=title)
    return tag(
        "td",
        tag(
            "span",
            tag("span", f"{format_score(cell.before, cell.decimals)} → ", class_="quiet"),
            format_score(cell.after, cell.decimals),
            class_="pair",
        ),
        tag("span", format_signed(cell.change, cell.decimals), class_=f"change {cell.direction}{' sure' if cell.apart else ''}"),
        title=title,
    )


def preflight_table(checks: Sequence[Mapping[str, Any]]) -> Html:
    """Return a table of the checks, each with its result, the measured value and the limit."""
    rows = [
        tag(
            "tr",
            tag(
                "td",
                tag("span", "✓ passed" if check["ok"] else "✗ failed", class_="good" if check["ok"] else "bad"),
                class_="outcome",
            ),
            tag("th", str(check["name"]), scope="row"),
            tag("td", _amount(check.get("value")), class_="number"),
            tag("td", _amount(check.get("limit")), class_="number"),
            tag("td", str(check.get("text") or ""), class_="words"),
        )
        for check in checks
    ]
    head = tag("tr", [tag("th", name, scope="col") for name in ("", "check", "measured", "limit", "description")])
    return tag("div", tag("table", tag("thead", head), tag("tbody", rows), class_="checks"), class_="scroll")


def _amount(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: MISSING}[value]
    return format_number(value) if isinstance(value, int | float) else str(value)


def recipe_text(recipe: Mapping[str, Any]) -> Html:
    """Return the resolved recipe as a collapsed block of JSON."""
    return tag(
        "details",
        tag("summary", "The resolved recipe, with all defaults"),
        tag("pre", json.dumps(recipe, indent=2, ensure_ascii=False)),
    )


def versions_list(versions: Mapping[str, Any]) -> Html:
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", str(value))) for name, value in versions.items()], class_="facts versions"
    )
