"""The report of a run: one self-contained HTML file that works offline, also for a run that has only just started."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from retouch.records.files import write_atomic
from retouch.records.folder import RunFolder
from retouch.records.summary import split_label
from retouch_view.report import curves, grids, headline, suites, tables
from retouch_view.report.markup import Html, join, tag


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run's folder and return its path.

    The same folder gives the same bytes. A section that has no data yet says so. Raises ValueError if ``run`` is not the folder of
    a run.
    """
    folder = RunFolder(run)
    write_atomic(folder.report, run_page(run).encode())
    return folder.report


def run_page(run: Path) -> str:
    """Return the report as HTML. Raises ValueError as ``write_report`` does."""
    folder = RunFolder(run)
    record = folder.read_recipe()
    recipe, versions = record["recipe"], record["versions"]
    sections = [*_results(folder, recipe), *_details(folder, recipe, versions)]
    page = html_page(str(recipe.get("name", folder.name)), _header(folder, recipe), join(sections))
    return f"<!doctype html>\n{page}\n"


def html_page(title: str, header: Html, main: Html) -> Html:
    """Return a complete page in the style of the reports. It works offline and loads no other file."""
    script = _asset("page.js")
    body = tag("body", header, tag("main", main), tag("script", script))
    return tag("html", _head(title, script), body, lang="en")


def _asset(name: str) -> Html:
    """Return a file of this package without escaping, because it contains only text of this package."""
    return Html(files("retouch_view.report").joinpath(name).read_text(encoding="utf-8"))


def _head(name: str, script: Html) -> Html:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{name} · Retouch"),
        tag("style", _asset("style.css")),
    )


def _last_step(metrics: Sequence[Mapping[str, Any]]) -> int:
    return int(metrics[-1]["step"]) if metrics else 0


def _header(folder: RunFolder, recipe: Mapping[str, Any]) -> Html:
    summary, metrics, timings, evals = folder.read_summary(), folder.read_metrics(), folder.read_timings(), folder.read_evals()
    steps = recipe.get("steps")
    first_split = [line for line in evals if line["split"] == evals[0]["split"]]
    declines = tables.significant_declines(first_split[0], first_split[-1]) if len(first_split) > 1 else []
    return tag(
        "header",
        tag("p", "Retouch · run report", class_="kicker"),
        tag("h1", str(recipe.get("name", folder.name))),
        headline.verdict(summary, last_step=_last_step(metrics), steps=steps if isinstance(steps, int) else None),
        headline.gap_bar(summary) if summary else None,
        headline.alarm_note(folder.read_alarm()),
        headline.declines_note(declines),
        headline.facts(
            recipe, last_step=_last_step(metrics), seconds=curves.seconds_spent(timings), cost=summary.cost if summary else {}
        ),
    )


def _results(folder: RunFolder, recipe: Mapping[str, Any]) -> list[Html]:
    metrics, evals, summary = folder.read_metrics(), folder.read_evals(), folder.read_summary()
    column = curves.headline_column(evals, summary)
    split = split_label(recipe.get("eval", {}).get("split", "test"))
    watched = [_section("Watched", _watched(metrics), "No watched metrics yet.")] if recipe.get("watch") else []
    return [
        _section("Reward", _one(curves.reward_section(metrics, evals, summary, split=split)), "No steps yet."),
        *suites.sections(folder.read_suites()),
        *watched,
        _section(f"{split.capitalize()} scores", _heldout(evals, column, split), f"No evaluation on {split} tasks yet."),
        _section("Before and after", _one(grids.before_after(folder, column=column)), f"No images of {split} tasks yet."),
        _section("Training groups", _groups(folder), "No images of training samples yet."),
    ]


def _details(folder: RunFolder, recipe: Mapping[str, Any], versions: Mapping[str, Any]) -> list[Html]:
    return [
        _section("Signals", _signals(folder.read_metrics()), "No metrics apart from the reward yet."),
        _section("Time", _one(curves.time_bars(folder.read_timings())), "No timings yet."),
        _section("Checks before the first step", _preflight(folder), "This run has no record of its checks."),
        _section("Recipe", [tables.recipe_text(recipe)], ""),
        _section("Versions", [tables.versions_list(versions)], ""),
    ]


def _section(title: str, content: Sequence[Html], empty: str) -> Html:
    return tag("section", tag("h2", title), content if content else tag("p", empty, class_="quiet"))


def _one(piece: Html | None) -> list[Html]:
    return [] if piece is None else [piece]


def _heldout(evals: Sequence[Mapping[str, Any]], column: str | None, split: str) -> list[Html]:
    found = tables.heldout_tables(evals, first=column, split_name=split)
    note = "Means over tasks, before → after, and the change; in bold if the two 95 % confidence intervals do not overlap."
    if split != "held-out":
        note += " These tasks are also trained on, so the scores measure fit, not generalisation."
    return [*found, tag("p", note, class_="quiet")] if found else []


def _groups(folder: RunFolder) -> list[Html]:
    strips = grids.groups(folder)
    return [
        strip if index == 0 else tag("details", tag("summary", f"The same at step {step}"), strip)
        for index, (step, strip) in enumerate(strips)
    ]


def _signals(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    shown, others = curves.signal_charts(metrics)
    parts = [tag("div", shown, class_="smalls")] if shown else []
    if others:
        title = f"All other metrics ({len(others)})"
        parts.append(tag("details", tag("summary", title), tag("div", others, class_="smalls")))
    return parts


def _watched(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    charts = curves.watch_charts(metrics)
    if not charts:
        return []
    steps_by_rule = curves.alarms(metrics).items()
    lines = [f"{rule} at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" for rule, steps in steps_by_rule]
    alarms = tag("p", f"Alarms: {'; '.join(lines)}.", class_="warning") if lines else tag("p", "No alarm.", class_="quiet")
    return [alarms, tag("div", charts, class_="smalls")]


def _preflight(folder: RunFolder) -> list[Html]:
    checks = folder.read_preflight()
    if not checks:
        return []
    passed = sum(bool(check["ok"]) for check in checks)
    return [tag("p", f"{passed} of {len(checks)} passed.", class_="quiet"), tables.preflight_table(checks)]
