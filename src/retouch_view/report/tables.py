"""The tables of the report: scores before and after training, pictures with scores, checks; and `retouch compare` in a terminal."""

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from retouch.core.answers import answer_in
from retouch.core.intervals import FEWEST, paired_change
from retouch.recipe.derived_facts import leaves
from retouch.records.files import open_file
from retouch.records.folder import RunFolder, Summary
from retouch.rewards.ledger.database import open_read_only
from retouch_judge.questions import quoted_fault
from retouch_rewards.completions import prompt_quality
from retouch_view.report.markup import (
    LARGE,
    MISSING,
    SMALL,
    Html,
    aligned,
    decimals_for,
    format_brief,
    format_duration,
    format_number,
    format_percent,
    format_score,
    format_signed,
    join,
    picture,
    scrolled,
    tag,
)

_LOG_BYTES = 2**15
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d [\d:]{8},\d{3}  ", re.ASCII | re.MULTILINE)  # how each message of the log begins
_ERROR = re.compile(r"(?!KeyboardInterrupt\b)[A-Z]\w+: ")
MOST_TASKS = 24
MOST_GROUPS = 8
MOST_MEMBERS = 24
MOST_ROWS = 12  # rows of one tag; a longer table is collapsed
_MOST_TIMES = 20  # more tasks are advised only if at most this many times as many would be enough
FEWEST_TASKS = 20  # a decline is reported only for rows with at least this many tasks


def number(value: Any) -> float:
    """A logged value as a float; NaN for null or text."""
    return float(value) if isinstance(value, int | float) else math.nan


def headline_column(evals: Sequence[Mapping[str, Any]], summary: Summary | None) -> str | None:
    """The held-out column that represents the run: the summary's, otherwise the reward, otherwise the first."""
    columns = [column for line in evals for column in columns_of(line)]
    preferred = ([summary.column] if summary else []) + ["reward", "overall", *columns]
    return next((column for column in preferred if column in columns), None)


def about(recipe: Mapping[str, Any], cost: Mapping[str, Any]) -> dict[str, str]:
    """What a run trains, in the words of its recorded recipe; what it does not say is left out. ``cost``: that of its summary,
    which knows the device."""
    policy, reward = (_section(recipe, name) for name in ("policy", "reward"))
    parts = _section(reward, "rewards") or {"reward": reward}
    how = {"full": "all weights", "lora": "LoRA"}.get(_kind(_section(policy, "train")), _kind(_section(policy, "train")))
    found = {
        "model": ", ".join(filter(None, (_kind(_section(policy, "model")), how))),
        "algorithm": " then ".join(dict.fromkeys(filter(None, (_kind(each) for each in _objectives(recipe))))),
        "reward": " + ".join(filter(None, (_kind(part) for part in parts.values() if isinstance(part, Mapping)))),
        "data": _kind(_section(recipe, "data")),
        "device": str(cost.get("device") or recipe.get("device") or ""),
    }
    return {name: words for name, words in found.items() if words}


def _objectives(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    phases = [phase for phase in recipe.get("phases") or () if isinstance(phase, Mapping)] or [{}]
    return [_section(phase, "objective") or _section(recipe, "objective") for phase in phases]


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = recipe.get(name)
    return found if isinstance(found, Mapping) else {}


def _kind(section: Mapping[str, Any]) -> str:
    """The name of a part: of its function, the columns of a table, the end of its path or class, otherwise its kind, with the
    surrogate of a policy gradient."""
    match section:
        case {"kind": "function", "name": name}:
            return f"function {name}"
        case {"kind": "table", "has": [*columns]}:
            return f"table with {', '.join(map(str, columns))}"
    named = next((str(section[key]) for key in ("path", "class") if section.get(key)), str(section.get("kind") or ""))
    name = named.rstrip("/").rpartition("/")[2].rpartition(":")[2].replace("_", " ")
    return f"{name} ({section['surrogate']})" if section.get("surrogate") else name


def last_words(folder: RunFolder) -> tuple[str | None, bool]:
    """Return the last message of the log, without a traceback (None without a log), and whether it is the error that ended the run.
    ``retouch.run.folder`` writes an error as "NAME: text"."""
    try:
        with open_file(folder.log()) as log:
            log.seek(max(0, log.seek(0, 2) - _LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return None, False
    message = _RECORD.split(text)[-1].partition("\nTraceback (most recent")[0].strip()
    return message or None, _ERROR.match(message) is not None


def loss_says_nothing(recipe: Mapping[str, Any]) -> bool:
    """Whether the loss of all phases is that of a policy gradient, whose value does not show learning."""
    return all(each.get("kind") == "policy_gradient" for each in _objectives(recipe))


def result_so_far(folder: RunFolder, evals: Sequence[Mapping[str, Any]], split: str) -> Summary | None:
    """What the summary will say, from the first and the last evaluation of a run that has none yet, over all tasks; None if there
    are not two evaluations with stored scores."""
    known = [line for line in evals if line["split"] == "heldout"]
    column = headline_column(known, None)
    if len(known) < 2 or column is None:
        return None
    before, after = (folder.read_scores(line["step"]).get(column, {}) for line in (known[0], known[-1]))
    gain = paired_change(before, after, folder.read_sources(known[-1]["step"]))
    if not gain.count:
        return None
    both = before.keys() & after.keys()
    return Summary(
        column=column,
        on=f"{gain.count} {split} task{'s' * (gain.count != 1)}",
        before=mean(before[task] for task in both),
        after=mean(after[task] for task in both),
        steps=known[-1]["step"],
        gain_ci95=gain.interval,
        independent_tasks=gain.clusters,
        needed_tasks=gain.clusters_for_significance,
        lower_is_better=column in known[-1].get("lower_is_better", ()),
    )


@dataclass(frozen=True, slots=True)
class Headline:
    """A sentence about a result: ``lead``, then ``change`` and a full stop. ``context``: the numbers to compare it with.
    ``direction``: "good" or "bad" if the interval of the change excludes 0, otherwise "flat"."""

    lead: str
    change: str
    direction: str
    context: str


def verdict(summary: Summary, *, so_far: bool) -> Headline:
    """Say what a summary means. A change without an interval, or whose interval contains 0, is no gain and no loss."""
    decimals, interval = decimals_of(summary), interval_of(summary)
    direction = direction_of(interval, lower_is_better=summary.lower_is_better)
    change = f"from {format_score(summary.before, decimals)} to {format_score(summary.after, decimals)}"
    verb = "changed" if direction == "flat" else "rose" if summary.gain > 0 else "fell"
    if interval is not None and direction == "flat":
        change += ", which is not statistically significant"
    words = f"A change of {format_signed(summary.gain, decimals)}"
    if interval is not None:
        words += f" (95 % confidence interval {format_signed(interval[0], decimals)} to {format_signed(interval[1], decimals)})"
    if summary.gap_closed is not None and summary.gap_closed > 0:
        words += f", {format_percent(summary.gap_closed)} of the gap to the ceiling of {format_score(summary.ceiling, decimals)}"
    words += "."
    known, needed = summary.independent_tasks, summary.needed_tasks
    if interval is None and known is not None:
        words += f" Fewer than {FEWEST} independent tasks (here: {known}) cannot tell a change from chance. Hold out more tasks."
    elif interval is not None and direction == "flat" and known and needed and needed <= _MOST_TIMES * known:
        words += (
            f" A change of this size would be significant with about {needed} independent tasks (here: {known}; tasks with the "
            "same source image count once). Hold out more tasks with data.held_out or eval.tasks."
        )
    if summary.best_of_k is not None:
        many = "several" if summary.k is None else str(summary.k)
        best = format_score(summary.best_of_k, decimals)
        words += f" For comparison, the best of {many} samples of the base policy scores {best}."
    for means, score in summary.others.items():
        words += f" {means.capitalize()}, the base policy scores {format_score(score, decimals)}."
    on = "So far, on" if so_far else "On"
    return Headline(f"{on} {summary.on}, {summary.column} {verb} ", change, direction, words)


def decimals_of(summary: Summary) -> int:
    return decimals_for((summary.before, summary.after, summary.ceiling))


def interval_of(summary: Summary) -> tuple[float, float] | None:
    """The confidence interval of the gain; None if it has no width."""
    ends = summary.gain_ci95
    return ends if ends is not None and ends[0] < ends[1] else None


def direction_of(interval: tuple[float, float] | None, *, lower_is_better: bool) -> str:
    """ "good" or "bad" if the confidence interval of a change has a width and excludes 0, otherwise "flat"."""
    low, high = interval or (0.0, 0.0)
    if low == high or low <= 0 <= high:
        return "flat"
    return "good" if (low > 0) != lower_is_better else "bad"


def seconds_spent(timings: Sequence[Mapping[str, Any]]) -> float:
    """Return the total time in seconds: for each step ``time/step`` if it was logged, otherwise the sum of its stages."""
    total = 0.0
    for line in timings:
        stages = [number(value) for name, value in line.items() if name.startswith("time/") and name != "time/step"]
        step_time = number(line.get("time/step"))
        total += step_time if math.isfinite(step_time) else math.fsum(filter(math.isfinite, stages))
    return total


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One cell: the mean before and after training, with confidence intervals if measured. ``change_ci``: that of the mean change.
    ``lower``: a lower value is better."""

    before: float | None
    after: float | None
    before_ci: tuple[float, float] | None
    after_ci: tuple[float, float] | None
    change_ci: tuple[float, float] | None
    decimals: int
    lower: bool

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def direction(self) -> str:
        """As ``direction_of``; without an interval of the change, the intervals of the two means must not overlap."""
        ends = self.change_ci
        if ends is None and self.before_ci is not None and self.after_ci is not None:
            ends = self.after_ci[0] - self.before_ci[1], self.after_ci[1] - self.before_ci[0]
        return direction_of(ends, lower_is_better=self.lower)


def compare_cell(
    before: Mapping[str, Any], after: Mapping[str, Any], *, row: str, column: str, change_ci: tuple[float, float] | None = None
) -> ComparedCell:
    """Compare the cell of a row and column in two evaluations, with as many decimals as the column needs."""
    return ComparedCell(
        before["table"].get(row, {}).get(column),
        after["table"].get(row, {}).get(column),
        interval(before, row=row, column=column),
        interval(after, row=row, column=column),
        change_ci,
        decimals_for(cells.get(column) for line in (before, after) for cells in line["table"].values()),
        lower=column in after.get("lower_is_better", ()),
    )


def interval(line: Mapping[str, Any], *, row: str, column: str) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a mean; None if the evaluation has none."""
    ends = line["ci95"].get(row, {}).get(column)
    return None if ends is None or None in ends else (ends[0], ends[1])


def columns_of(line: Mapping[str, Any]) -> list[str]:
    """Return the columns of an evaluation in their order, without the number of tasks. The combined reward is left out if it equals
    one of the other columns."""
    rows = line["table"].values()
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "n"))
    others = [column for column in columns if column != "reward"]
    duplicate = any(all(row.get(column) == row.get("reward") for row in rows) for column in others)
    return others if duplicate else columns


def significant_declines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe every score that declined: its interval after training is entirely worse than its interval before training. Only
    rows with at least ``FEWEST_TASKS`` tasks are compared."""
    found = []
    for row, cells in after["table"].items():
        if (cells.get("n") or 0) < FEWEST_TASKS:
            continue
        for column in columns_of(after):
            cell = compare_cell(before, after, row=row, column=column)
            if cell.direction == "bad":
                where = "" if row == "all" else f" ({_row_name(row).replace('=', ' ', 1)})"
                before_and_after = (format_score(value, cell.decimals) for value in (cell.before, cell.after))
                found.append(f"{column}{where} {' to '.join(before_and_after)}")
    return found


def unusable_answers(run: Path) -> str:
    """How many calls of judges and servers gave no usable answer, and the latest of these; empty if there are none."""
    calls, failed = 0, 0
    latest: list[tuple[Any, ...]] = []
    newest = "SELECT at, fault, substr(text, 1, 1000) FROM answers WHERE scores IS NULL ORDER BY at DESC LIMIT 1"
    for file in sorted(run.glob("ledger*.sqlite")):
        with suppress(ValueError, OSError, sqlite3.Error), closing(open_read_only(file)) as connection:
            every, usable = connection.execute("SELECT count(*), count(scores) FROM answers").fetchone()
            calls, failed, latest = calls + every, failed + every - usable, latest + connection.execute(newest).fetchall()
    return f"{failed} of {calls} calls, the latest with {quoted_fault([max(latest)[1:]])}" if latest else ""


def _row_name(row: str) -> str:
    return {"all": "all tasks", "headline": "headline tasks"}.get(row, row)


def heldout_tables(folder: RunFolder, evals: Sequence[Mapping[str, Any]], *, first: str | None, split_name: str) -> list[Html]:
    """Compare the first and the last evaluation of each split, with the column ``first`` in front. ``split_name``: the displayed
    name of the split "heldout". Columns that share a prefix ("success/") get a separate table."""
    found = []
    for split in dict.fromkeys(line["split"] for line in evals):
        lines = sorted((line for line in evals if line["split"] == split), key=lambda line: int(line["step"]))
        before, after = lines[0], lines[-1]
        name, changes = str(split), {}  # by column, the interval of the mean change of all tasks
        if split == "heldout":
            name, sources = split_name, folder.read_sources(after["step"])
            old, new = (folder.read_scores(line["step"]) for line in (before, after))
            changes = {column: paired_change(old.get(column, {}), scores, sources).interval for column, scores in new.items()}
        families: dict[str, list[str]] = {}
        for column in sorted(columns_of(after), key=lambda column: column != first):
            families.setdefault(column.rpartition("/")[0], []).append(column)
        steps = f"step {before['step']}" + ("" if before is after else f" → step {after['step']}")
        for family, columns in families.items():
            title = f"{name}, {family}" if family else name
            found.append(_heldout(title, steps, before, after, columns, changes))
    return found


def _heldout(
    title: str, steps: str, before: Mapping[str, Any], after: Mapping[str, Any], columns: Sequence[str], changes: Mapping[str, Any]
) -> Html:
    groups: dict[str, list[str]] = {}
    for row, cells in after["table"].items():
        if any(cells.get(column) is not None for column in columns):
            groups.setdefault(row.partition("=")[0] if "=" in row else "", []).append(row)
    head = tag("tr", [tag("th", name.rpartition("/")[2], scope="col") for name in ("", "tasks", *columns)])

    def lines(rows: Sequence[str]) -> Iterator[Html]:
        for row in rows:
            count = after["table"][row].get("n")
            ends = changes if row == "all" else {}
            compared = [compare_cell(before, after, row=row, column=name, change_ci=ends.get(name)) for name in columns]
            cells = [_cell(cell, single=before is after) for cell in compared]
            title = tag("th", row.split("=", 1)[1] if "=" in row else _row_name(row), scope="row")
            yield tag("tr", title, tag("td", MISSING if count is None else str(count), class_="count"), cells)

    width = str(len(columns) + 2)
    body: list[Html] = []
    folded: list[Html] = []
    for name, rows in groups.items():
        if len(rows) > MOST_ROWS:
            title_of_rows = tag("summary", f"{name}: {len(rows)} rows")
            folded.append(tag("details", title_of_rows, scrolled(head, lines(rows), style="scores")))
        else:
            if name:
                body.append(tag("tr", tag("th", name, colspan=width, scope="colgroup"), class_="group"))
            body += lines(rows)
    without_score = ""  # for each of the columns, the number of tasks
    for column in columns:
        counts = [line.get("missing", {}).get(column, 0) for line in ([after] if before is after else [before, after])]
        if any(counts):
            without_score += f" · no {column} for {' → '.join(map(str, counts))} of {after['table']['all']['n']} tasks"
    caption = tag("p", tag("b", title), f" · {steps}", without_score, class_="caption")
    return join([caption, scrolled(head, body, style="scores"), *folded])


def _cell(cell: ComparedCell, *, single: bool) -> Html:
    def score(value: float | None) -> str:
        return format_score(value, cell.decimals)

    ends = (
        [("after", cell.after_ci)] if single else [("before", cell.before_ci), ("after", cell.after_ci), ("change", cell.change_ci)]
    )
    title = "; ".join(f"{name} 95 %: {score(ci[0])} to {score(ci[1])}" for name, ci in ends if ci is not None) or None
    if single:
        return tag("td", score(cell.after), title=title)
    pair = tag("span", tag("span", f"{score(cell.before)} → ", class_="quiet"), score(cell.after), class_="pair")
    change = tag("span", format_signed(cell.change, cell.decimals), class_=f"change {cell.direction}")
    return tag("td", pair, change, title=title)


def preflight_table(checks: Sequence[Mapping[str, Any]]) -> Html:
    """Return a table of the checks, each with its result, the measured value and the limit."""
    outcomes = {True: tag("span", "✓ passed", class_="good"), False: tag("span", "✗ failed", class_="bad")}
    rows = [
        tag(
            "tr",
            tag("td", outcomes[bool(check["ok"])], class_="outcome"),
            tag("th", str(check["name"]), scope="row"),
            tag("td", _amount(check.get("value")), class_="number"),
            tag("td", _amount(check.get("limit")), class_="number"),
            tag("td", str(check.get("text") or ""), class_="words"),
        )
        for check in checks
    ]
    head = tag("tr", [tag("th", name, scope="col") for name in ("", "check", "measured", "limit", "description")])
    return scrolled(head, rows, style="checks")


def _amount(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: MISSING}[value]
    return format_number(value) if isinstance(value, int | float) else str(value)


def tasks_over_training(folder: RunFolder, *, column: str | None) -> Html | None:
    """Show the held-out tasks at the first, the middle and the last step with images; None if there are no images."""
    stored = {step: {line["task"]: line for line in _of(folder, step, "heldout")} for step in folder.sample_steps()}
    steps = [step for step in stored if stored[step]]
    if not steps:
        return None
    chosen = list(dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])))
    lines = [line for task, line in stored[chosen[0]].items() if task in stored[chosen[-1]]]
    tasks = [[stored[step][line["task"]] for step in chosen if line["task"] in stored[step]] for line in lines[:MOST_TASKS]]
    decimals = decimals_for(_value(line, column) for task in tasks for line in task)
    same: dict[str, Any] = {"column": column, "decimals": decimals, "rewrites": _rewrites_prompts(folder)}
    cards = [_card(folder, task, index=index, **same) for index, task in enumerate(tasks)]
    words = "The same tasks with the same seeds at every evaluation, with the reward of each image."
    words += f" There are only images of step {steps[0]}." if len(steps) == 1 else ""
    if len(cards) < len(lines):
        words += f" The first {len(cards)} of {len(lines)}."
    return tag("div", tag("p", words, class_="quiet"), tag("div", cards, class_="cards", data_sortable=len(chosen) > 1))


def _of(folder: RunFolder, step: int, kind: str) -> list[dict[str, Any]]:
    return [line for line in folder.read_samples(step) if line["set"] == kind]


def _path(folder: RunFolder, line: Mapping[str, Any], name: str) -> Path | None:
    """Return the path of the image; None if the line has no image, or names a file outside the folder of its step."""
    file = line[name]
    return folder.samples(line["step"]) / file if isinstance(file, str) and Path(file).name == file else None


def _value(line: Mapping[str, Any], column: str | None) -> float:
    """Return the score shown under the image: the reward of the sample, or the headline column if there is no reward."""
    reward = number(line["reward"])
    return reward if math.isfinite(reward) or column is None else number(line["scores"].get(column))


def _card(
    folder: RunFolder, lines: Sequence[Mapping[str, Any]], *, index: int, column: str | None, decimals: int, rewrites: bool
) -> Html:
    """A held-out task with its lines at several steps."""
    first, last = lines[0], lines[-1]
    gain = _value(last, column) - _value(first, column)
    moved = len(lines) > 1
    names = [f"step {line['step']}" if line["step"] else "before" for line in lines]
    pictures = [shown("source", _path(folder, first, "source"), None)] if first["source"] else []
    for name, line in zip(names, lines, strict=True):
        style = "after" if moved and line is last else ""
        pictures.append(shown(name, _path(folder, line, "image"), _scores(line, column, decimals), style=style))
    if first["target"]:
        pictures.append(shown("target", _path(folder, first, "target"), None))
    tags = [tag("span", f"{name} {value}", class_="tag") for name, value in first["tags"].items()]
    change = None
    if moved and math.isfinite(gain):
        change = tag("span", format_signed(gain, decimals), class_="change")  # of one task: no colour says that it is a gain
    ends = dict(zip([names[0], names[-1]], [first, last], strict=True))
    return tag(
        "article",
        _instruction(first),
        tag("div", pictures, class_="row"),
        (_completion(line, label=name, rewrites=rewrites) or "" for name, line in ends.items()),
        tag("p", change, tags, class_="tags"),
        class_="card",
        data_place=index,
        data_gain=f"{gain:.6f}" if math.isfinite(gain) else "0",
    )


def _instruction(line: Mapping[str, Any]) -> Html:
    # dir="auto" confines right-to-left text and direction-changing characters to its own element.
    return tag("p", str(line["instruction"]) or "(no instruction)", class_="instruction", dir="auto")


def _scores(line: Mapping[str, Any], column: str | None, decimals: int) -> Html:
    """Show the reward of the sample, and its other scores in small print below."""
    value = _value(line, column)
    main = "no score" if not math.isfinite(value) else format_score(value, decimals)
    named = [(name, number(shown)) for name, shown in line["scores"].items() if name != column and "/" not in name]
    small = [tag("span", f"{name} {format_brief(shown)}") for name, shown in named if math.isfinite(shown)]
    return tag("span", tag("b", main), tag("span", small, class_="scores-small") if small else None, class_="verdicts")


def shown(label: str, path: Path | None, scores: Html | None, *, style: str = "", edge: int = LARGE) -> Html:
    caption = tag("figcaption", tag("span", label, class_="label"), scores)
    return tag("figure", picture(path, words=label, edge=edge), caption, class_=f"shown {style}".strip())


def groups(folder: RunFolder) -> list[tuple[int, Html]]:
    """Return (step, strips) for the training groups of the last and of the first step with stored groups."""
    steps = [step for step in folder.sample_steps() if _of(folder, step, "group")]
    found, rewrites = [], _rewrites_prompts(folder)
    for step in dict.fromkeys([*steps[-1:], *steps[:1]]):
        members: dict[int, list[dict[str, Any]]] = {}
        for line in _of(folder, step, "group"):
            members.setdefault(line["group"], []).append(line)
        ranked = sorted(members.values(), key=_mean_reward, reverse=True)
        note, count = "", len(ranked)
        if count > MOST_GROUPS:
            ranked = [ranked[round(index * (count - 1) / (MOST_GROUPS - 1))] for index in range(MOST_GROUPS)]
            note = f" {MOST_GROUPS} of {count} groups, evenly spaced in this order."
        caption = f"Step {step}: groups sorted by mean reward, highest first; samples of a group sorted by reward.{note}"
        strips = [_strip(folder, group, rewrites=rewrites) for group in ranked]
        found.append((step, tag("div", tag("p", caption, class_="quiet"), strips)))
    return found


def _mean_reward(group: Sequence[Mapping[str, Any]]) -> float:
    known = [value for value in (number(line["reward"]) for line in group) if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else -math.inf


def _strip(folder: RunFolder, group: list[dict[str, Any]], *, rewrites: bool) -> Html:
    judged = [line for line in group if math.isfinite(number(line["reward"]))]
    missing = [line for line in group if not math.isfinite(number(line["reward"]))]
    ranked = sorted(judged, key=lambda line: (-number(line["reward"]), line["slot"])) + missing
    head = ranked[0]
    given = [shown(name, _path(folder, head, name), None, edge=SMALL) for name in ("source", "target") if head[name]]
    rewards = [number(line["reward"]) for line in judged]
    notes = []
    decimals = decimals_for(rewards)
    if rewards:
        ends = f"from {format_score(min(rewards), decimals)} to {format_score(max(rewards), decimals)}"
        notes.append(f"mean {format_score(_mean_reward(group), decimals)}, {ends}")
        if len(rewards) > 1 and min(rewards) == max(rewards):
            notes.append("all equal, so all advantages are 0")
    if missing:
        notes.append(f"{len(missing)} without a score")
    if len(ranked) > MOST_MEMBERS:
        notes.append(f"the best {MOST_MEMBERS // 2} and the worst {MOST_MEMBERS // 2} of {len(ranked)} shown")
        ranked = ranked[: MOST_MEMBERS // 2] + ranked[-(MOST_MEMBERS // 2) :]
    worded = " worded" if any(line.get("text") is not None for line in ranked) else ""
    return tag(
        "article",
        _instruction(head),
        tag("p", "; ".join(notes), class_="quiet"),
        tag(
            "div",
            tag("div", given, class_="given") if given else None,
            tag("div", [_member(folder, line, decimals, rewrites=rewrites) for line in ranked], class_=f"members{worded}"),
        ),
        class_="strip",
    )


def _member(folder: RunFolder, line: Mapping[str, Any], decimals: int, *, rewrites: bool) -> Html:
    reward, advantage = number(line["reward"]), number(line["advantage"])
    known = [(name, number(value)) for name, value in line["scores"].items() if math.isfinite(number(value))]
    scores, name = "; ".join(f"{name} {format_brief(value)}" for name, value in known), f"sample {line['slot']}"
    main, gain = tag("b", "no score", class_="quiet"), None
    if math.isfinite(reward):
        main = tag("b", format_score(reward, decimals))
    if math.isfinite(reward + advantage):
        direction = "flat" if not abs(advantage) >= 0.005 else "good" if advantage > 0 else "bad"
        gain = tag("span", format_signed(advantage), class_=f"advantage {direction}")
    caption = tag("figcaption", main, gain, _completion(line, label="", rewrites=rewrites))
    image = picture(_path(folder, line, "image"), words=name, edge=SMALL)
    return tag("figure", image, caption, class_="shown member", title=f"{name}: {scores}" if scores else name)


def _rewrites_prompts(folder: RunFolder) -> bool:
    """Whether the policy's completions are prompts for an image model, which replace the user's prompt."""
    renderer = folder.read_recipe()["recipe"].get("renderer")
    return isinstance(renderer, Mapping) and renderer.get("kind") == "prompt"


def _completion(line: Mapping[str, Any], *, label: str, rewrites: bool) -> Html | None:
    """Show the completion of a sample; for a rewritten prompt also a comparison with the original. None without a completion."""
    if line.get("text") is None:
        return None
    text = str(line["text"])
    head = tag("span", f"{label} ", class_="quiet") if label else None
    shown = tag("p", head, text or "(empty)", class_="written", dir="auto")
    if not rewrites:
        return shown
    prompt, note = answer_in(text), "contains no prompt"
    if prompt is not None:
        original = str(line["instruction"])
        before, after, quality = len(original.split()), len(prompt.split()), prompt_quality(original, prompt)
        note = f"{before} → {after} word{'s' * (after != 1)}, prompt quality {quality.total:.1f} of 5"
    return join([shown, tag("p", note, class_="told quiet")])


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with its last evaluation. ``before``, ``after``: the known scores of held-out tasks, by id. ``sources``: the sources of
    these tasks, by id."""

    name: str
    recipe: Mapping[str, str]
    column: str
    step: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    sources: Mapping[str, str]
    lower: bool
    gap_closed: float | None
    seconds: float


def comparison(folders: Sequence[Path]) -> str:
    """Compare two or more runs, as text; each is compared to the first one.

    The score is the column that the first run reports, on all held-out tasks. A difference is the mean over the tasks that both
    runs evaluated, with a paired 95 % interval (``core.intervals``). Raises ValueError as ``_read_all`` does.
    """
    runs = _read_all(folders)
    first = runs[0]
    decimals = decimals_for(value for run in runs for value in (*run.before.values(), *run.after.values()))

    def change(before: Mapping[str, float], run: _Run) -> str:
        found = paired_change(before, run.after, run.sources)
        if not found.count:
            return MISSING
        ends = [format_signed(end, decimals) for end in found.interval or ()]
        return format_signed(found.mean, decimals) + (f" ({' to '.join(ends)})" if ends else "")

    lines = [f"{first.column} on all held-out tasks, before training and at the last evaluation"]
    rows = [["run", "step", "tasks", "before", "after", "change (95 %)", "share of the gap", "time in steps"]]
    for run in runs:
        both = run.before.keys() & run.after.keys()
        ends = [mean(scores[task] for task in both) if both else None for scores in (run.before, run.after)]
        gap = MISSING if run.gap_closed is None else format_percent(run.gap_closed)
        shown = [*(format_score(end, decimals) for end in ends), change(run.before, run) if run.step else MISSING, gap]
        rows.append([run.name, str(run.step), str(len(both)), *shown, format_duration(run.seconds)])
    lines += aligned(rows)
    if any(run.gap_closed is not None for run in runs):
        lines.append("The share of the gap is of the tasks of eval.headline, as in summary.json.")
    lines += ["", f"Difference to {first.name} at the last evaluation, on the same held-out tasks (95 %)"]
    rows = []
    for run in runs[1:]:
        shared = len(first.after.keys() & run.after.keys())
        rows.append([run.name, f"{change(first.after, run)} on {shared} tasks" if shared else "no held-out task in common"])
    lines += aligned(rows)
    lines.append("The intervals contain the spread between tasks, not the spread between seeds: repeat each run with other seeds.")
    keys = sorted({key for run in runs for key in run.recipe} - {"name", "out"})
    differing = [key for key in keys if len({run.recipe.get(key) for run in runs}) > 1]
    if not differing:
        return "\n".join([*lines, "", "The recipes do not differ."])
    rows = [["", *(run.name for run in runs)]]
    rows += [[key, *(run.recipe.get(key, MISSING) for run in runs)] for key in differing]
    return "\n".join([*lines, "", "What differs in the recipes", *aligned(rows)])


def paired_differences(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the same as data: ``column``, and for each run after the first ``n`` tasks, ``before`` and ``after``: the means of the
    first and of this run on them, the mean ``difference`` and its ``interval``, and the ``direction`` as in ``Headline``."""
    first, *others = _read_all(folders)
    rows = []
    for run in others:
        found = paired_change(first.after, run.after, run.sources)
        both = first.after.keys() & run.after.keys()
        before, after = (mean(scores[task] for task in both) if both else math.nan for scores in (first.after, run.after))
        means = {"n": found.count, "before": before, "after": after, "difference": found.mean, "interval": found.interval}
        rows.append({"run": run.name, **means, "direction": direction_of(found.interval, lower_is_better=run.lower)})
    return {"column": first.column, "first": first.name, "rows": rows}


def _read_all(folders: Sequence[Path]) -> list[_Run]:
    """Read runs. Raises ValueError for fewer than two runs, for the same run twice, and for a run without an evaluation or without
    the column that the first one reports."""
    if len(folders) < 2:
        raise ValueError("retouch compare RUN RUN...: give at least two runs")
    absolute = [folder.resolve() for folder in folders]
    repeated = [folder for index, folder in enumerate(folders) if absolute[index] in absolute[:index]]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice; compare different runs")
    counts = Counter(path.name for path in absolute)
    # Runs of the same name are named by their folders.
    names = [path.name if counts[path.name] == 1 else str(folder) for path, folder in zip(absolute, folders, strict=True)]
    first = _read(folders[0], names[0])
    return [first, *(_read(folder, name, first.column) for folder, name in zip(folders[1:], names[1:], strict=True))]


def _read(root: Path, name: str, column: str | None = None) -> _Run:
    """Read a run. ``column``: the score; None is the one that the run reports."""
    folder = RunFolder(root)
    recipe, evals, summary = folder.read_recipe()["recipe"], folder.read_evals(), folder.read_summary()
    known = [line for line in evals if line["split"] == evals[0]["split"] and folder.evaluation(line["step"]).exists()]
    reported = headline_column(known, summary)
    if reported is None:
        raise ValueError(f"{root} has no evaluation yet: compare it after its first one, or set eval.every")
    chosen = column or reported
    before, after = (folder.read_scores(known[index]["step"]) for index in (0, -1))
    if chosen not in after:
        raise ValueError(f"{root} has no held-out score {chosen!r}, which the first run reports; it has {', '.join(after)}")
    return _Run(
        name=name,
        recipe={key: json.dumps(value) for key, value in leaves(recipe)},
        column=chosen,
        step=known[-1]["step"],
        before=before[chosen],
        after=after[chosen],
        sources=folder.read_sources(known[-1]["step"]),
        lower=chosen in known[-1].get("lower_is_better", ()),
        gap_closed=summary.gap_closed if summary is not None and summary.column == chosen else None,
        seconds=seconds_spent(folder.read_timings()),
    )
