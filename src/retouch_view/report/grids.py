"""The images of a run: held-out tasks before and after training, and training groups sorted by reward."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.core.answers import answer_in
from retouch.records.folder import RunFolder
from retouch.rewards.text.prompt_quality import prompt_quality
from retouch_view.report.curves import number
from retouch_view.report.markup import Html, join, tag
from retouch_view.report.numbers import decimals_for, format_brief, format_score, format_signed
from retouch_view.report.pictures import LARGE, SMALL, picture

MOST_TASKS = 24
MOST_GROUPS = 8
MOST_MEMBERS = 24


@dataclass(frozen=True, slots=True)
class _Pair:
    """The stored line of a held-out task before and after training. ``moved``: the two lines are of different steps."""

    before: dict[str, Any]
    after: dict[str, Any]
    moved: bool
    column: str | None

    @property
    def values(self) -> tuple[float, float]:
        """The scores shown under the two images: the reward, or the headline column if there is no reward."""
        return _value(self.before, self.column), _value(self.after, self.column)


def before_after(folder: RunFolder, *, column: str | None) -> Html | None:
    """Show the held-out tasks at the first and at the last step with images; None if there are no images."""
    steps = [step for step in folder.sample_steps() if _of(folder, step, "heldout")]
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    after = {line["task"]: line for line in _of(folder, last, "heldout")}
    lines = [line for line in _of(folder, first, "heldout") if line["task"] in after]
    pairs = [_Pair(line, after[line["task"]], first != last, column) for line in lines[:MOST_TASKS]]
    decimals = decimals_for(value for pair in pairs for value in pair.values)
    rewrites = _rewrites_prompts(folder)
    cards = [_card(folder, pair, index=index, decimals=decimals, rewrites=rewrites) for index, pair in enumerate(pairs)]
    steps_shown = f"Before: step {first}; after: step {last}" if first != last else f"Step {first}; there are no later images yet"
    words = f"The same tasks with the same seeds at every evaluation. {steps_shown}."
    if len(cards) < len(lines):
        words += f" The first {len(cards)} of {len(lines)}."
    return tag("div", tag("p", words, class_="quiet"), tag("div", cards, class_="cards", data_sortable=first != last))


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


def _card(folder: RunFolder, pair: _Pair, *, index: int, decimals: int, rewrites: bool) -> Html:
    before, after, moved = pair.before, pair.after, pair.moved
    gain = pair.values[1] - pair.values[0]
    pictures = [_shown("source", _path(folder, before, "source"), None)] if before["source"] else []
    pictures.append(_shown("before", _path(folder, before, "image"), _scores(before, pair.column, decimals)))
    if moved:
        pictures.append(_shown("after", _path(folder, after, "image"), _scores(after, pair.column, decimals), style="after"))
    if before["target"]:
        pictures.append(_shown("target", _path(folder, before, "target"), None))
    tags = [tag("span", f"{name} {value}", class_="tag") for name, value in before["tags"].items()]
    change = (
        tag("span", format_signed(gain, decimals), class_=f"change {_direction(gain)}") if moved and math.isfinite(gain) else None
    )
    return tag(
        "article",
        _instruction(before),
        tag("div", pictures, class_="row"),
        _completion(before, label="before", rewrites=rewrites),
        _completion(after, label="after", rewrites=rewrites) if moved else None,
        tag("p", change, tags, class_="tags"),
        class_="card",
        data_place=index,
        data_gain=f"{gain:.6f}" if math.isfinite(gain) else "0",
    )


def _instruction(line: Mapping[str, Any]) -> Html:
    # dir="auto" confines right-to-left text and direction-changing characters to its own element.
    return tag("p", str(line["instruction"]) or "(no instruction)", class_="instruction", dir="auto")


def _direction(change: float) -> str:
    return "flat" if not abs(change) >= 0.0005 else "good" if change > 0 else "bad"


def _scores(line: Mapping[str, Any], column: str | None, decimals: int) -> Html:
    """Show the reward of the sample, and its other scores in small print below."""
    value = _value(line, column)
    main = "no score" if not math.isfinite(value) else format_score(value, decimals)
    named = [(name, number(shown)) for name, shown in line["scores"].items() if name != column and "/" not in name]
    small = [tag("span", f"{name} {format_brief(shown)}") for name, shown in named if math.isfinite(shown)]
    return tag("span", tag("b", main), tag("span", small, class_="scores-small") if small else None, class_="verdicts")


def _shown(label: str, path: Path | None, scores: Html | None, *, style: str = "", edge: int = LARGE) -> Html:
    return tag(
        "figure",
        picture(path, words=label, edge=edge),
        tag("figcaption", tag("span", label, class_="label"), scores),
        class_=f"shown {style}".strip(),
    )


def groups(folder: RunFolder) -> list[tuple[int, Html]]:
    """Return (step, strips) for the training groups of the last and of the first step with stored groups."""
    steps = [step for step in folder.sample_steps() if _of(folder, step, "group")]
    return [(step, _groups(folder, step)) for step in dict.fromkeys([*steps[-1:], *steps[:1]])]


def _groups(folder: RunFolder, step: int) -> Html:
    members: dict[int, list[dict[str, Any]]] = {}
    for line in _of(folder, step, "group"):
        members.setdefault(line["group"], []).append(line)
    ranked = sorted(members.values(), key=_mean_reward, reverse=True)
    shown = _spread(ranked, MOST_GROUPS)
    note = "" if len(shown) == len(ranked) else f" {len(shown)} of {len(ranked)} groups, evenly spaced in this order."
    caption = f"Step {step}: groups sorted by mean reward, highest first; samples of a group sorted by reward.{note}"
    rewrites = _rewrites_prompts(folder)
    return tag("div", tag("p", caption, class_="quiet"), [_strip(folder, group, rewrites=rewrites) for group in shown])


def _spread(items: Sequence[list[dict[str, Any]]], most: int) -> list[list[dict[str, Any]]]:
    """Choose at most ``most`` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


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
    scores = "; ".join(
        f"{name} {format_brief(number(value))}" for name, value in line["scores"].items() if math.isfinite(number(value))
    )
    return tag(
        "figure",
        picture(_path(folder, line, "image"), words=f"sample {line['slot']}", edge=SMALL),
        tag(
            "figcaption",
            tag("b", format_score(reward, decimals)) if math.isfinite(reward) else tag("b", "no score", class_="quiet"),
            tag("span", format_signed(advantage), class_=f"advantage {_direction(advantage)}")
            if math.isfinite(reward + advantage)
            else None,
            _completion(line, label="", rewrites=rewrites),
        ),
        class_="shown member",
        title=f"sample {line['slot']}" + (f": {scores}" if scores else ""),
    )


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
    return join([shown, tag("p", _prompt_note(str(line["instruction"]), text), class_="told quiet")]) if rewrites else shown


def _prompt_note(original: str, text: str) -> str:
    prompt = answer_in(text)
    if prompt is None:
        return "contains no prompt"
    quality = prompt_quality(original, prompt)
    before, after = len(original.split()), len(prompt.split())
    return f"{before} → {after} word{'s' * (after != 1)}, prompt quality {quality.total:.1f} of 5"
