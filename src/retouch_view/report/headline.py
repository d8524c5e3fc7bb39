"""The top of the page: the result of the run in a sentence, a bar from the base to the ceiling, and key facts."""

from collections.abc import Mapping, Sequence
from typing import Any

from retouch.records.summary import Summary
from retouch_view.report.markup import Html, tag
from retouch_view.report.numbers import decimals_for, format_duration, format_percent, format_score, format_signed

# The report advises more tasks only if at most this many times as many tasks would be enough.
_MOST_TASKS = 20


def verdict(summary: Summary | None, *, last_step: int, steps: int | None) -> Html:
    """Return a sentence about the result, and one with the numbers to compare it with; or the progress of an unfinished run."""
    if summary is None:
        if last_step == 0:
            return tag("p", "This run has just started: no training step is done yet.", class_="verdict")
        of = f" of {steps}" if steps else ""
        return tag("p", f"This run is in progress: step {last_step}{of}. The result appears when it ends.", class_="verdict")
    return tag("div", tag("p", _outcome(summary), class_="verdict"), tag("p", _context(summary), class_="context"))


def _decimals(summary: Summary) -> int:
    return decimals_for((summary.before, summary.after, summary.ceiling))


def _interval(summary: Summary) -> tuple[float, float] | None:
    """The confidence interval of the gain; None if it has no width (a single task, for example)."""
    ends = summary.gain_ci95
    return ends if ends is not None and ends[0] < ends[1] else None


def _direction(summary: Summary) -> str:
    """ "good" or "bad"; "flat" if the confidence interval of the gain contains 0."""
    low, high = _interval(summary) or (summary.gain, summary.gain)
    if low <= 0 <= high:
        return "flat"
    return "good" if summary.is_better(low, 0.0) else "bad"


def _outcome(summary: Summary) -> list[str | Html]:
    decimals, direction = _decimals(summary), _direction(summary)
    change = f"from {format_score(summary.before, decimals)} to {format_score(summary.after, decimals)}"
    where = f"On {summary.on}, {summary.column}"
    if _interval(summary) is None:
        return [f"{where} changed ", tag("strong", change), "."]
    if direction == "flat":
        return [f"{where} changed ", tag("strong", change), ", which is not statistically significant."]
    verb = "rose" if summary.gain > 0 else "fell"
    return [f"{where} {verb} ", tag("strong", change, class_=direction), "."]


def _context(summary: Summary) -> str:
    decimals, interval = _decimals(summary), _interval(summary)
    words = f"A change of {format_signed(summary.gain, decimals)}"
    if interval is not None:
        words += f" (95 % confidence interval {format_signed(interval[0], decimals)} to {format_signed(interval[1], decimals)})"
    if summary.gap_closed is not None and summary.gap_closed > 0:
        words += f", {format_percent(summary.gap_closed)} of the gap to the ceiling of {format_score(summary.ceiling, decimals)}"
    words += "."
    known, needed = summary.independent_tasks, summary.needed_tasks
    if interval is not None and _direction(summary) == "flat" and known and needed and needed <= _MOST_TASKS * known:
        words += (
            f" A change of this size would be significant with about {needed} independent tasks (here: {known}; tasks with the "
            "same source image count once). Hold out more tasks with data.held_out or eval.tasks."
        )
    if summary.best_of_k is not None:
        many = "several" if summary.k is None else str(summary.k)
        words += (
            f" For comparison, the best of {many} samples of the base policy scores {format_score(summary.best_of_k, decimals)}."
        )
    return words


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
        return tag("span", f"{name} ", tag("b", format_score(value, _decimals(summary))), style=style)

    def stretch(ends: tuple[float, float], style: str) -> Html:
        left, right = sorted(position(end) for end in ends)
        return tag("span", class_=style, style=f"left:{left:.2f}%;width:{right - left:.2f}%")

    rail = [stretch((summary.before, summary.after), f"gained {_direction(summary)}")]
    if (interval := _interval(summary)) is not None:
        rail.append(stretch((summary.before + interval[0], summary.before + interval[1]), "whisker"))
    rows = [tag("div", label("before", summary.before), label("ceiling", summary.ceiling), class_="labels")]
    if summary.best_of_k is not None:
        rail.append(tag("span", class_="tick", style=f"left:{position(summary.best_of_k):.2f}%"))
        rows.append(tag("div", label(f"best of {summary.k or 'k'}", summary.best_of_k), class_="labels minor"))
    top = tag("div", label("after", summary.after), class_="labels")
    return tag("div", top, tag("div", rail, class_="rail"), rows, class_="gap")


def facts(recipe: Mapping[str, Any], *, last_step: int, seconds: float, cost: Mapping[str, Any]) -> Html:
    """Key facts about the run: the recipe's main settings and the cost."""
    rows: list[tuple[str, str]] = []
    steps = recipe.get("steps")
    rows.append(("steps", f"{last_step} of {steps}" if isinstance(steps, int) and steps != last_step else str(last_step)))
    for name in ("tasks_per_step", "group_size", "learning_rate", "seed", "device"):
        value = recipe.get(name)
        if name not in cost and isinstance(value, str | int | float):
            rows.append((name.replace("_", " "), value if isinstance(value, str) else _plain_number(value)))
    if seconds > 0:
        rows.append(("time in steps", format_duration(seconds)))
    rows += [(name, _plain_number(value) if isinstance(value, int | float) else str(value)) for name, value in cost.items()]
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows], class_="facts")


def _plain_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def alarm_note(record: Mapping[str, Any] | None) -> Html | None:
    """Say why an alarm stopped the run; None if no alarm stopped it."""
    if record is None:
        return None
    back = "" if record["back_to"] is None else f" The run is back in the state of step {record['back_to']}."
    texts = "; ".join(str(alarm["text"]) for alarm in record["alarms"])
    return tag("p", tag("strong", f"Stopped by an alarm after step {record['step']}: "), f"{texts}.{back}", class_="warning")


def declines_note(declines: Sequence[str]) -> Html | None:
    """Warn about the held-out scores that declined significantly; None if there are no declines."""
    if not declines:
        return None
    shown = "; ".join(declines[:6]) + (f"; and {len(declines) - 6} more" if len(declines) > 6 else "")
    return tag("p", tag("strong", "What got worse: "), shown, ".", class_="warning")
