"""The top of the page: what the run achieved, in a sentence, a bar from the base to the ceiling, and a few facts."""

from collections.abc import Mapping, Sequence
from typing import Any

from retouch.records.summary import Summary
from retouch.report.markup import Html, tag
from retouch.report.numbers import decimals_for, duration, percent, score, signed


def verdict(summary: Summary | None, *, last_step: int, steps: int | None) -> Html:
    """One sentence on the outcome, and one on what it stands beside."""
    if summary is None:
        if last_step == 0:
            return tag("p", "This run has only just started: nothing has been learned yet.", class_="verdict")
        of = f" of {steps}" if steps else ""
        return tag("p", f"This run is under way: step {last_step}{of}. The verdict comes when it ends.", class_="verdict")
    return tag("div", tag("p", _outcome(summary), class_="verdict"), tag("p", _context(summary), class_="context"))


def _decimals(summary: Summary) -> int:
    return decimals_for((summary.before, summary.after, summary.ceiling))


def _interval(summary: Summary) -> tuple[float, float] | None:
    """The interval of the gain; one without width (that of a single task, say) tells nothing of chance and counts as none."""
    ends = summary.gain_ci95
    return ends if ends is not None and ends[0] < ends[1] else None


def _direction(summary: Summary) -> str:
    """Good, bad, or flat where the interval of the gain holds 0."""
    low, high = _interval(summary) or (summary.gain, summary.gain)
    return "good" if low > 0 else "bad" if high < 0 else "flat"


def _outcome(summary: Summary) -> list[str | Html]:
    decimals, direction = _decimals(summary), _direction(summary)
    moved = f"from {score(summary.before, decimals)} to {score(summary.after, decimals)}"
    where = f"On {summary.on}, {summary.column}"
    if _interval(summary) is None:
        return [f"{where} went ", tag("strong", moved), "."]
    if direction == "flat":
        return [f"{where} went ", tag("strong", moved), ": no change that can be told from chance."]
    verb = {"good": "rose", "bad": "fell"}[direction]
    return [f"{where} {verb} ", tag("strong", moved, class_=direction), "."]


def _context(summary: Summary) -> str:
    decimals, interval = _decimals(summary), _interval(summary)
    said = f"A change of {signed(summary.gain, decimals)}"
    if interval is not None:
        said += f" (95 % interval {signed(interval[0], decimals)} to {signed(interval[1], decimals)})"
    if summary.gap_closed is not None and summary.gain > 0:
        said += f", {percent(summary.gap_closed)} of the gap to the ceiling of {score(summary.ceiling, decimals)}"
    said += "."
    if summary.best_of_k is not None:
        many = "several" if summary.k is None else str(summary.k)
        said += f" For comparison, the best of {many} samples of the base scores {score(summary.best_of_k, decimals)}."
    return said


def gap_bar(summary: Summary) -> Html | None:
    """From the base to the ceiling, with what was gained; nothing where no ceiling was measured."""
    if summary.ceiling is None or summary.ceiling <= min(summary.before, summary.after):
        return None
    low = min(summary.before, summary.after)
    high = max(summary.ceiling, summary.after, summary.best_of_k or low)

    def place(value: float) -> float:
        return 100 * min(1.0, max(0.0, (value - low) / (high - low)))

    def label(name: str, value: float) -> Html:
        # Shifted by its own share of its width, a label never leaves the bar's ends.
        style = f"left:{place(value):.2f}%;transform:translateX(-{place(value):.2f}%)"
        return tag("span", f"{name} ", tag("b", score(value, _decimals(summary))), style=style)

    def stretch(ends: tuple[float, float], style: str) -> Html:
        left, right = sorted(place(end) for end in ends)
        return tag("span", class_=style, style=f"left:{left:.2f}%;width:{right - left:.2f}%")

    rail = [stretch((summary.before, summary.after), f"gained {_direction(summary)}")]
    if (interval := _interval(summary)) is not None:
        rail.append(stretch((summary.before + interval[0], summary.before + interval[1]), "whisker"))
    rows = [tag("div", label("before", summary.before), label("ceiling", summary.ceiling), class_="labels")]
    if summary.best_of_k is not None:
        rail.append(tag("span", class_="tick", style=f"left:{place(summary.best_of_k):.2f}%"))
        rows.append(tag("div", label(f"best of {summary.k or 'k'}", summary.best_of_k), class_="labels minor"))
    top = tag("div", label("after", summary.after), class_="labels")
    return tag("div", top, tag("div", rail, class_="rail"), rows, class_="gap")


def facts(recipe: Mapping[str, Any], *, last_step: int, seconds: float, cost: Mapping[str, Any]) -> Html:
    """What kind of run this was, from the recipe's first lines and what it took."""
    rows: list[tuple[str, str]] = []
    steps = recipe.get("steps")
    rows.append(("steps", f"{last_step} of {steps}" if isinstance(steps, int) and steps != last_step else str(last_step)))
    for name in ("tasks_per_step", "group_size", "learning_rate", "seed", "device"):
        value = recipe.get(name)
        if name not in cost and isinstance(value, str | int | float):
            rows.append((name.replace("_", " "), value if isinstance(value, str) else _plain_number(value)))
    if seconds > 0:
        rows.append(("time in steps", duration(seconds)))
    rows += [(name, _plain_number(value) if isinstance(value, int | float) else str(value)) for name, value in cost.items()]
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows], class_="facts")


def _plain_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def alarm_note(kept: Mapping[str, Any] | None) -> Html | None:
    """Why the run was ended, where a rule of its watch did."""
    if kept is None:
        return None
    back = "" if kept["back_to"] is None else f" Its state is again that of step {kept['back_to']}."
    told = "; ".join(str(alarm["text"]) for alarm in kept["alarms"])
    return tag("p", tag("strong", f"Ended by an alarm after step {kept['step']}: "), f"{told}.{back}", class_="warning")


def losses_note(falls: Sequence[str]) -> Html | None:
    """A warning of held-out figures that fell beyond both intervals."""
    if not falls:
        return None
    shown = "; ".join(falls[:6]) + (f"; and {len(falls) - 6} more" if len(falls) > 6 else "")
    return tag("p", tag("strong", "What got worse: "), shown, ".", class_="warning")
