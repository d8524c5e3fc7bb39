"""The report of a run: one self-contained HTML file that works offline, also for a run that has only just started."""

import base64
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from retouch.records.files import write_atomic
from retouch.records.folder import RunFolder, Summary, split_label
from retouch.records.ownership import NotOwner, current_owner
from retouch.run.hooks import AlarmStop, Hook, StepResult
from retouch.run.step import ScoredRollout
from retouch_view.report import charts, tables
from retouch_view.report.markup import (
    Html,
    format_duration,
    format_score,
    join,
    scrolled,
    tag,
)

log = logging.getLogger("retouch")


def write_report(run: Path, *, ended: str | None = None) -> Path:
    """Write ``report.html`` into a run's folder and return its path. The same folder gives the same bytes. A section without
    data says so. ``ended``: of an unfinished run, the error that ends its process, or "" if it stops on request; None: the
    files say it. Raises ValueError if ``run`` is not the folder of a run."""
    folder = RunFolder(run)
    write_atomic(folder.report, run_page(run, ended=ended).encode())
    return folder.report


def run_page(run: Path, *, ended: str | None = None) -> str:
    """Return the report as HTML. Arguments and errors are those of ``write_report``."""
    folder = RunFolder(run)
    record = folder.read_recipe()
    recipe, versions = record["recipe"], record["versions"]
    metrics, evals, timings, summary = folder.read_metrics(), folder.read_evals(), folder.read_timings(), folder.read_summary()
    column = tables.headline_column(evals, summary)
    split = split_label(recipe.get("eval", {}).get("split", "test"))
    shown = summary or tables.result_so_far(folder, evals, split)
    checks, groups = folder.read_preflight(), tables.groups(folder)
    passed = sum(bool(check["ok"]) for check in checks)
    more = [tag("details", tag("summary", f"The same at step {step}"), strip) for step, strip in groups[1:]]
    document = json.dumps(recipe, indent=2, ensure_ascii=False)
    sections = [
        _section("Reward", charts.reward_section(metrics, evals, summary, split=split), "No steps."),
        *_suites(folder.read_suites()),
        *([_section("Watched", _watched(metrics), "No watched metrics.")] if recipe.get("watch") else []),
        _section(
            f"{split.capitalize()} tasks over training",
            tables.tasks_over_training(folder, column=column),
            f"No images of {split} tasks are stored.",
        ),
        _section(f"{split.capitalize()} scores", _heldout(folder, evals, column, split), f"No evaluation on {split} tasks."),
        _section("Training groups", [*(strip for _, strip in groups[:1]), *more], "No images of training samples are stored."),
        _section("Metrics", _signals(metrics, recipe), "No metrics apart from the reward."),
        _section("Time", charts.time_bars(timings), "No timings."),
        _section(
            "Checks before the first step",
            [tag("p", f"{passed} of {len(checks)} passed.", class_="quiet"), tables.preflight_table(checks)] if checks else [],
            "This run has no record of its checks.",
        ),
        _section(
            "Recipe",
            [tag("details", tag("summary", "The resolved recipe, with all defaults"), tag("pre", document))],
            "",
        ),
        _section("Versions", [_facts([(name, str(value)) for name, value in versions.items()], "facts versions")], ""),
    ]
    last_step = int(metrics[-1]["step"]) if metrics else 0
    first_split = [line for line in evals if line["split"] == evals[0]["split"]]
    declines = tables.significant_declines(first_split[0], first_split[-1]) if len(first_split) > 1 else []
    worse = "; ".join(declines[:6]) + (f"; and {len(declines) - 6} more" if len(declines) > 6 else "")
    stopped = None
    if (alarm := folder.read_alarm()) is not None:
        back = "" if alarm["back_to"] is None else f" The run is back in the state of step {alarm['back_to']}."
        why = f"{'; '.join(str(each['text']) for each in alarm['alarms'])}.{back}"
        stopped = tag("p", tag("strong", f"Stopped by an alarm after step {alarm['step']}: "), why, class_="warning")
    unusable = tables.unusable_answers(run)
    steps = recipe.get("steps")
    title = str(recipe.get("name", folder.name))
    header = tag(
        "header",
        tag("p", "Retouch · run report", class_="kicker"),
        tag("h1", title),
        _facts(list(tables.about(recipe, summary.cost if summary else {}).items()), "facts about"),
        progress(folder, ended, last_step, steps) if summary is None and stopped is None else None,
        result(shown, so_far=summary is None) if shown else None,
        gap_bar(summary) if summary else None,
        stopped,
        tag("p", tag("strong", "Judges without a usable answer: "), unusable, ".", class_="warning") if unusable else None,
        tag("p", tag("strong", "What got worse: "), worse, ".", class_="warning") if declines else None,
        _facts(_main_facts(recipe, last_step, tables.seconds_spent(timings), summary.cost if summary else {}), "facts"),
    )
    return f"<!doctype html>\n{html_page(title, header, join(sections))}\n"


def html_page(title: str, header: Html, main: Html) -> Html:
    """Return a complete page in the style of the reports. It works offline and loads no other file."""
    # These files contain only text of this package, so they are not escaped. They become one script and one style.
    live, own = files("retouch_view.live") / "static", files("retouch_view.report")
    scripts = [(live / name).read_text("utf-8") for name in ("dom.js", "export.js", "charts.js")] + [
        (own / "page.js").read_text("utf-8")
    ]
    script = Html("".join(re.sub(r"^import .*\n|^export ", "", each, flags=re.MULTILINE) for each in scripts))
    style = Html((live / "charts.css").read_text("utf-8") + (own / "style.css").read_text("utf-8"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · Retouch"),
        tag("style", style),
    )
    return tag("html", head, tag("body", header, tag("main", main), tag("script", script)), lang="en")


def _section(title: str, content: Html | Sequence[Html] | None, empty: str) -> Html:
    return tag("section", tag("h2", title), content if content else tag("p", empty, class_="quiet"))


def _heldout(folder: RunFolder, evals: Sequence[Mapping[str, Any]], column: str | None, split: str) -> list[Html]:
    found = tables.heldout_tables(folder, evals, first=column, split_name=split)
    note = (
        "Means over tasks, before → after, and the change: green (better) or red (worse) only if its 95 % confidence interval "
        "excludes 0. For a part of the tasks, the intervals of the two means must not overlap."
    )
    if split != "held-out":
        note += " These tasks are also trained on, so the scores measure fit, not generalisation."
    return [*found, tag("p", note, class_="quiet")] if found else []


def _signals(metrics: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any]) -> list[Html]:
    shown, others, zero = charts.signal_charts(metrics, without=["policy/loss"] if tables.loss_says_nothing(recipe) else [])
    parts = [tag("div", shown, class_="charts")] if shown else []
    if others:
        title = f"All other metrics ({len(others)})"
        parts.append(tag("details", tag("summary", title), tag("div", others, class_="charts")))
    return [*parts, tag("p", f"0 at every step: {', '.join(zero)}.", class_="quiet")] if zero else parts


def _watched(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    drawn = charts.watch_charts(metrics)
    if not drawn:
        return []
    steps_by_rule = charts.alarms(metrics).items()
    lines = [f"{rule} at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" for rule, steps in steps_by_rule]
    alarms = tag("p", f"Alarms: {'; '.join(lines)}.", class_="warning") if lines else tag("p", "No alarm.", class_="quiet")
    return [alarms, tag("div", drawn, class_="charts")]


def _suites(lines: Sequence[Mapping[str, Any]]) -> list[Html]:
    """The results of ``eval.suites`` and their alarms: for each suite a chart of the headline over the steps, unless only step 0
    was measured, and a table of the headline of all items and of each category."""
    shown = []
    for name in dict.fromkeys(line["suite"] for line in lines):
        own = [line for line in lines if line["suite"] == name]
        column, rows, last = own[-1]["headline"], list(own[-1]["table"]), max(int(line["step"]) for line in own)
        body, points = [], []
        for line in own:
            cells = [line["table"].get(row, {}).get(column) for row in rows]
            shown_cells = [tag("td", _with_interval(cell)) for cell in cells]
            body.append(tag("tr", tag("td", str(line["step"])), *shown_cells, tag("td", str(line["missing"]))))
            cell = line["table"].get("all", {}).get(column)
            if cell is not None and cell["mean"] is not None:
                low, high = (math.nan if cell[end] is None else cell[end] for end in ("low", "high"))
                points.append((int(line["step"]), cell["mean"], low, high))
        head = tag("tr", tag("th", "step"), *(tag("th", row) for row in rows), tag("th", "missing"))
        alarms = [f"after step {line['step']}, {line['alarm']}" for line in own if line["alarm"] is not None]
        shown.append(
            tag(
                "div",
                tag("p", tag("b", name), f", {column}", class_="caption"),
                charts.draw(name, [charts.series(column, points, dots=True)], last, size="lead") if points and last > 0 else None,
                scrolled(head, body),
                tag("p", f"Alarm: {'; '.join(alarms)}.", class_="warning") if alarms else None,
            )
        )
    note = "Means over items with 95 % intervals, of the policy after each step. The rows are the same as in `retouch bench`."
    return [tag("section", tag("h2", "Benchmarks"), shown, tag("p", note, class_="quiet"))] if shown else []


def _with_interval(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["mean"] is None:
        return "-"
    between = "" if cell["low"] is None else f" ({cell['low']:.2f} to {cell['high']:.2f})"
    return f"{cell['mean']:.2f}{between}"


def progress(folder: RunFolder, ended: str | None, step: int, steps: object) -> Html:
    """Return a sentence about a run that is not finished. ``ended``: as for ``write_report``."""
    if ended is None and current_owner(folder.root) is None:
        words, failed = tables.last_words(folder)
        ended = f"{words}" if failed else ""
    of = f"{step} of {steps}" if isinstance(steps, int) else str(step)
    if ended:
        return tag("p", tag("strong", "Failed", class_="bad"), f" after step {of}: ", ended, class_="state")
    if step == 0:
        return tag("p", "This run has just started: no training step is done yet.", class_="state")
    if ended is not None:
        return tag("p", tag("strong", "Stopped"), f" after step {of}. The same command continues it.", class_="state")
    return tag("p", f"This run is in progress: step {of}.", class_="state")


def result(summary: Summary, *, so_far: bool) -> Html:
    """Return a sentence about the result, and one with the numbers to compare it with."""
    found = tables.verdict(summary, so_far=so_far)
    sentence = [found.lead, tag("strong", found.change, class_=None if found.direction == "flat" else found.direction), "."]
    return tag("div", tag("p", sentence, class_="verdict"), tag("p", found.context, class_="context"))


def gap_bar(summary: Summary) -> Html | None:
    """A bar from the base to the ceiling with the gain on it, better scores on the right; None if no ceiling was measured."""
    worst, best = (max, min) if summary.lower_is_better else (min, max)
    left_end = worst(summary.before, summary.after)
    if summary.ceiling is None or not summary.is_better(summary.ceiling, left_end):
        return None
    right_end = best(summary.ceiling, summary.after, left_end if summary.best_of_k is None else summary.best_of_k)

    def position(value: float) -> float:
        return 100 * min(1.0, max(0.0, (value - left_end) / (right_end - left_end)))

    def label(name: str, value: float) -> Html:
        # Shifting a label by the same fraction of the label's width keeps it within the bar.
        style = f"left:{position(value):.2f}%;transform:translateX(-{position(value):.2f}%)"
        return tag("span", f"{name} ", tag("b", format_score(value, tables.decimals_of(summary))), style=style)

    def stretch(ends: tuple[float, float], style: str) -> Html:
        left, right = sorted(position(end) for end in ends)
        return tag("span", class_=style, style=f"left:{left:.2f}%;width:{right - left:.2f}%")

    interval = tables.interval_of(summary)
    rail = [
        stretch((summary.before, summary.after), f"gained {tables.direction_of(interval, lower_is_better=summary.lower_is_better)}")
    ]
    if interval is not None:
        rail.append(stretch((summary.before + interval[0], summary.before + interval[1]), "whisker"))
    rows = [tag("div", label("before", summary.before), label("ceiling", summary.ceiling), class_="labels")]
    if summary.best_of_k is not None:
        rail.append(tag("span", class_="tick", style=f"left:{position(summary.best_of_k):.2f}%"))
        rows.append(tag("div", label(f"best of {summary.k or 'k'}", summary.best_of_k), class_="labels minor"))
    top = tag("div", label("after", summary.after), class_="labels")
    return tag("div", top, tag("div", rail, class_="rail"), rows, class_="gap")


def _main_facts(recipe: Mapping[str, Any], last_step: int, seconds: float, cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    def plain(value: object) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    steps = recipe.get("steps")
    rows = [("steps", f"{last_step} of {steps}" if isinstance(steps, int) and steps != last_step else str(last_step))]
    for name in ("tasks_per_step", "group_size", "learning_rate", "seed"):
        value = recipe.get(name)
        if name not in cost and isinstance(value, str | int | float):
            rows.append((name.replace("_", " "), plain(value)))
    if seconds > 0:
        rows.append(("time in steps", format_duration(seconds)))
    return rows + [(name, plain(value)) for name, value in cost.items() if name not in ("device", "training seconds")]


def _facts(rows: Sequence[tuple[str, str]], style: str) -> Html:
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows], class_=style)


class ReportHook(Hook):
    """Writes the report after each step whose samples are stored, and at the end of the run."""

    station = "evaluated"

    def __init__(self, folder: RunFolder, *, is_main: bool) -> None:
        self._folder, self._is_main = folder, is_main
        self._written = -1

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        if step.shown and step.step < step.steps:
            self._write(step.step)

    def ended(self, step: int, *, finished: bool) -> None:
        self._write(step, ended=None if finished else "")

    def close(self) -> None:
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, AlarmStop | NotOwner | OSError):
            self._write(-1, ended=f"{type(error).__name__}: {error}")

    def _write(self, step: int, *, ended: str | None = None) -> None:
        if not self._is_main or (step == self._written and ended is None):
            return
        self._written = step
        self._folder.require_owner()
        try:
            log.info("report: %s", write_report(self._folder.root, ended=ended))
        except ValueError as error:  # others can damage the files that it shows; this must not stop the run
            log.warning("no report was written: %s", error)


_ALL = "all"
