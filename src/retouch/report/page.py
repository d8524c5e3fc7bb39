"""The report of a run: one HTML file that needs nothing else, opens offline, and says what there is even of a run just started."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from retouch.records.files import write_atomic
from retouch.records.folder import RunFolder
from retouch.records.summary import split_label
from retouch.report import curves, grids, headline, tables
from retouch.report.markup import Html, join, tag


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run's folder and return where it is.

    The same folder gives the same bytes. What is not there yet (no step, no evaluation, no pictures) is said in a sentence.
    ValueError where ``run`` is not a run's folder.
    """
    folder = RunFolder(run)
    page = "<!doctype html>\n" + _page(folder) + "\n"
    write_atomic(folder.report, page.encode())
    return folder.report


def _page(folder: RunFolder) -> Html:
    kept = folder.read_recipe()
    recipe, versions = kept["recipe"], kept["versions"]
    script = _asset("page.js")
    body = tag("body", _header(folder, recipe), tag("main", _sections(folder, recipe, versions)), tag("script", script))
    return tag("html", _head(str(recipe.get("name", folder.name)), script), body, lang="en")


def _asset(name: str) -> Html:
    """A file of this package, as it is: it holds no text of anybody else."""
    return Html(files("retouch.report").joinpath(name).read_text(encoding="utf-8"))


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
    falls = tables.falls(first_split[0], first_split[-1]) if len(first_split) > 1 else []
    return tag(
        "header",
        tag("p", "Retouch · report of a run", class_="kicker"),
        tag("h1", str(recipe.get("name", folder.name))),
        headline.verdict(summary, last_step=_last_step(metrics), steps=steps if isinstance(steps, int) else None),
        headline.gap_bar(summary) if summary else None,
        headline.alarm_note(folder.read_alarm()),
        headline.losses_note(falls),
        headline.facts(
            recipe, last_step=_last_step(metrics), seconds=curves.seconds_spent(timings), cost=summary.cost if summary else {}
        ),
    )


def _sections(folder: RunFolder, recipe: Mapping[str, Any], versions: Mapping[str, Any]) -> Html:
    metrics, evals, summary = folder.read_metrics(), folder.read_evals(), folder.read_summary()
    time = curves.time_bars(folder.read_timings())
    column = curves.headline_column(evals, summary)
    judged = split_label(recipe.get("eval", {}).get("split", "test"))
    watched = [_section("Watched", _watched(metrics), "Nothing was watched yet.")] if recipe.get("watch") else []
    return join(
        [
            _section("Reward", _one(curves.reward_section(metrics, evals, summary, judged=judged)), "No step yet, so no curve."),
            *watched,
            _section(f"{judged.capitalize()} scores", _heldout(evals, column, judged), f"No evaluation on {judged} tasks yet."),
            _section("Before and after", _one(grids.before_after(folder, column=column)), f"No pictures of {judged} tasks yet."),
            _section("Training groups", _groups(folder), "No pictures of training samples yet."),
            _section("Signals", _signals(metrics), "Nothing but the reward was logged yet."),
            _section("Time", _one(time), "No step has been timed yet."),
            _section("Checks before the first step", _preflight(folder), "No checks were kept for this run."),
            _section("Recipe", [tables.recipe_text(recipe)], ""),
            _section("Versions", [tables.versions_list(versions)], ""),
        ]
    )


def _section(title: str, content: Sequence[Html], otherwise: str) -> Html:
    return tag("section", tag("h2", title), content if content else tag("p", otherwise, class_="quiet"))


def _one(piece: Html | None) -> list[Html]:
    return [] if piece is None else [piece]


def _heldout(evals: Sequence[Mapping[str, Any]], column: str | None, judged: str) -> list[Html]:
    made = tables.heldout_tables(evals, first=column, judged=judged)
    note = "Means over tasks, before → after, and the change; in bold where the two 95 % intervals do not touch."
    if judged != "held-out":
        note += " These tasks train too, so what is measured is fit and no gain."
    return [*made, tag("p", note, class_="quiet")] if made else []


def _groups(folder: RunFolder) -> list[Html]:
    strips = grids.groups(folder)
    return [
        strip if place == 0 else tag("details", tag("summary", f"The same at step {step}"), strip)
        for place, (step, strip) in enumerate(strips)
    ]


def _signals(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    shown, others = curves.signal_charts(metrics)
    made = [tag("div", shown, class_="smalls")] if shown else []
    if others:
        title = f"Everything else that was logged ({len(others)})"
        made.append(tag("details", tag("summary", title), tag("div", others, class_="smalls")))
    return made


def _watched(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    made = curves.watch_charts(metrics)
    if not made:
        return []
    raised = curves.alarms(metrics).items()
    told = [f"{rule} at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" for rule, steps in raised]
    alarms = tag("p", f"Alarms: {'; '.join(told)}.", class_="warning") if told else tag("p", "No alarm.", class_="quiet")
    return [alarms, tag("div", made, class_="smalls")]


def _preflight(folder: RunFolder) -> list[Html]:
    checks = folder.read_preflight()
    if not checks:
        return []
    passed = sum(bool(check["ok"]) for check in checks)
    return [tag("p", f"{passed} of {len(checks)} passed.", class_="quiet"), tables.preflight_table(checks)]
