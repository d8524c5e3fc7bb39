"""The pictures of a run: held-out tasks before and after, and training groups from the best sample to the worst."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.records.folder import RunFolder
from retouch.report.curves import number
from retouch.report.markup import Html, tag
from retouch.report.numbers import brief, decimals_for, score, signed
from retouch.report.pictures import LARGE, SMALL, picture
from retouch.report.writing import rewrites_prompts, written

MOST_TASKS = 24
MOST_GROUPS = 8
MOST_MEMBERS = 24


@dataclass(frozen=True, slots=True)
class _Pair:
    """A held-out task's line before and after; ``moved``: there are later pictures than the first."""

    before: dict[str, Any]
    after: dict[str, Any]
    moved: bool
    column: str | None

    @property
    def values(self) -> tuple[float, float]:
        """What both pictures are shown with: the reward, else the headline's column."""
        return _value(self.before, self.column), _value(self.after, self.column)


def before_after(folder: RunFolder, *, column: str | None) -> Html | None:
    """The held-out tasks of the first pictures beside the same ones of the last; None where there are none."""
    steps = [step for step in folder.sample_steps() if _of(folder, step, "heldout")]
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    after = {line["task"]: line for line in _of(folder, last, "heldout")}
    lines = [line for line in _of(folder, first, "heldout") if line["task"] in after]
    pairs = [_Pair(line, after[line["task"]], first != last, column) for line in lines[:MOST_TASKS]]
    decimals = decimals_for(value for pair in pairs for value in pair.values)
    rewrites = rewrites_prompts(folder)
    cards = [_card(folder, pair, place=place, decimals=decimals, rewrites=rewrites) for place, pair in enumerate(pairs)]
    when = f"Before is step {first}, after is step {last}" if first != last else f"Both are step {first}: no later pictures yet"
    words = f"The same tasks with the same seeds at every evaluation. {when}."
    if len(cards) < len(lines):
        words += f" The first {len(cards)} of {len(lines)}."
    return tag("div", tag("p", words, class_="quiet"), tag("div", cards, class_="cards", data_sortable=first != last))


def _of(folder: RunFolder, step: int, kind: str) -> list[dict[str, Any]]:
    return [line for line in folder.read_samples(step) if line["set"] == kind]


def _path(folder: RunFolder, line: Mapping[str, Any], name: str) -> Path | None:
    """The picture's path; None where the line names none, or one outside the folder of its step."""
    file = line[name]
    return folder.samples(line["step"]) / file if isinstance(file, str) and Path(file).name == file else None


def _value(line: Mapping[str, Any], column: str | None) -> float:
    """What the sample is shown with: its reward, else the headline's column."""
    reward = number(line["reward"])
    return reward if math.isfinite(reward) or column is None else number(line["scores"].get(column))


def _card(folder: RunFolder, pair: _Pair, *, place: int, decimals: int, rewrites: bool) -> Html:
    before, after, moved = pair.before, pair.after, pair.moved
    gain = pair.values[1] - pair.values[0]
    pictures = [_shown("source", _path(folder, before, "source"), None)] if before["source"] else []
    pictures.append(_shown("before", _path(folder, before, "image"), _scores(before, pair.column, decimals)))
    if moved:
        pictures.append(_shown("after", _path(folder, after, "image"), _scores(after, pair.column, decimals), style="after"))
    if before["target"]:
        pictures.append(_shown("target", _path(folder, before, "target"), None))
    tags = [tag("span", f"{name} {value}", class_="tag") for name, value in before["tags"].items()]
    change = tag("span", signed(gain, decimals), class_=f"change {_direction(gain)}") if moved and math.isfinite(gain) else None
    return tag(
        "article",
        _instruction(before),
        tag("div", pictures, class_="row"),
        written(before, label="before", rewrites=rewrites),
        written(after, label="after", rewrites=rewrites) if moved else None,
        tag("p", change, tags, class_="tags"),
        class_="card",
        data_place=place,
        data_gain=f"{gain:.6f}" if math.isfinite(gain) else "0",
    )


def _instruction(line: Mapping[str, Any]) -> Html:
    # dir="auto" keeps text that runs from right to left, and signs that turn text around, inside its own box.
    return tag("p", str(line["instruction"]) or "(no instruction)", class_="instruction", dir="auto")


def _direction(change: float) -> str:
    return "flat" if not abs(change) >= 0.0005 else "good" if change > 0 else "bad"


def _scores(line: Mapping[str, Any], column: str | None, decimals: int) -> Html:
    """The sample's reward, and its other scores small beneath."""
    value = _value(line, column)
    main = "not judged" if not math.isfinite(value) else score(value, decimals)
    named = [(name, number(shown)) for name, shown in line["scores"].items() if name != column and "/" not in name]
    small = [tag("span", f"{name} {brief(shown)}") for name, shown in named if math.isfinite(shown)]
    return tag("span", tag("b", main), tag("span", small, class_="scores-small") if small else None, class_="verdicts")


def _shown(label: str, path: Path | None, below: Html | None, *, style: str = "", edge: int = LARGE) -> Html:
    return tag(
        "figure",
        picture(path, words=label, edge=edge),
        tag("figcaption", tag("span", label, class_="label"), below),
        class_=f"shown {style}".strip(),
    )


def groups(folder: RunFolder) -> list[tuple[int, Html]]:
    """The training groups of the last step that has any, and of the first, as (step, strips)."""
    steps = [step for step in folder.sample_steps() if _of(folder, step, "group")]
    return [(step, _groups(folder, step)) for step in dict.fromkeys([*steps[-1:], *steps[:1]])]


def _groups(folder: RunFolder, step: int) -> Html:
    members: dict[int, list[dict[str, Any]]] = {}
    for line in _of(folder, step, "group"):
        members.setdefault(line["group"], []).append(line)
    ranked = sorted(members.values(), key=_mean_reward, reverse=True)
    shown = _spread(ranked, MOST_GROUPS)
    note = "" if len(shown) == len(ranked) else f" {len(shown)} of {len(ranked)} groups, spread evenly over their ranking."
    caption = (
        f"Step {step}: groups from the highest mean reward to the lowest; within each, from the best sample to the worst.{note}"
    )
    rewrites = rewrites_prompts(folder)
    return tag("div", tag("p", caption, class_="quiet"), [_strip(folder, group, rewrites=rewrites) for group in shown])


def _spread(items: Sequence[list[dict[str, Any]]], most: int) -> list[list[dict[str, Any]]]:
    """At most so many of the items, the first and the last among them, evenly apart."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _mean_reward(group: Sequence[Mapping[str, Any]]) -> float:
    known = [value for value in (number(line["reward"]) for line in group) if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else -math.inf


def _strip(folder: RunFolder, group: list[dict[str, Any]], *, rewrites: bool) -> Html:
    judged = [line for line in group if math.isfinite(number(line["reward"]))]
    missing = [line for line in group if not math.isfinite(number(line["reward"]))]
    ranked = sorted(judged, key=lambda line: (-number(line["reward"]), line["slot"])) + missing
    head = ranked[0]
    given = [_shown(name, _path(folder, head, name), None, edge=SMALL) for name in ("source", "target") if head[name]]
    rewards = [number(line["reward"]) for line in judged]
    notes = []
    decimals = decimals_for(rewards)
    if rewards:
        ends = f"from {score(min(rewards), decimals)} to {score(max(rewards), decimals)}"
        notes.append(f"mean {score(_mean_reward(group), decimals)}, {ends}")
        if len(rewards) > 1 and min(rewards) == max(rewards):
            notes.append("all equal: this group teaches nothing")
    if missing:
        notes.append(f"{len(missing)} not judged")
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
    told = "; ".join(f"{name} {brief(number(value))}" for name, value in line["scores"].items() if math.isfinite(number(value)))
    return tag(
        "figure",
        picture(_path(folder, line, "image"), words=f"sample {line['slot']}", edge=SMALL),
        tag(
            "figcaption",
            tag("b", score(reward, decimals)) if math.isfinite(reward) else tag("b", "not judged", class_="quiet"),
            tag("span", signed(advantage), class_=f"advantage {_direction(advantage)}")
            if math.isfinite(reward + advantage)
            else None,
            written(line, label="", rewrites=rewrites),
        ),
        class_="shown member",
        title=f"sample {line['slot']}" + (f": {told}" if told else ""),
    )
