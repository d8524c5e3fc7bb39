"""When to raise an alarm: each rule of a recipe's ``watch`` as a function of the looks so far, and of nothing else.

So a resumed run raises what an unbroken one would have raised.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retouch.recipe.watch import Diversity, Factor, HeldOutJudge, Response, Shift, Watch
from retouch.types import Column
from retouch.watch.looks import Change, Look, change


class Alarm(ValueError):
    """The run was ended by a rule of ``watch``."""


@dataclass(frozen=True, slots=True)
class Raised:
    """``rule``: its key in ``watch``. ``text``: what was seen, with figures. ``response``: what the recipe wants done."""

    rule: str
    text: str
    response: Response


def raised(watch: Watch, looks: Sequence[Look], diversity: Sequence[float], columns: Mapping[str, Column]) -> list[Raised]:
    """The alarms of the last of ``looks``, which begin with that of the start. ``diversity``: of every step so far. ``columns``:
    the reward's, by which the canaries are measured."""
    found = {}
    for name, rule in watch.rules.items():
        match rule:
            case HeldOutJudge():
                found[name] = _parted(looks, rule)
            case Diversity():
                found[name] = _uniform(diversity, rule)
            case Factor():
                found[name] = _factor(name, looks, rule)
            case Shift():
                found[name] = _shift(name, looks, rule)
    if watch.canaries is not None:
        found["canaries"] = _other_judge(looks, columns, watch.canaries.limit)
    if watch.text is not None:
        found["text"] = _painted(looks, watch.text.limit)
    rules = watch.rules
    return [Raised(name, text, rules[name].on_alarm) for name, text in found.items() if text is not None]


def since_best(looks: Sequence[Look]) -> tuple[Look, Change, Change]:
    """The look at which the held-out judge thought best of the pictures, and what the proxy and it changed by since then."""
    best = max(looks, key=lambda look: -math.inf if math.isnan(look.mean("heldout")) else look.mean("heldout"))
    now = looks[-1]
    proxy, heldout = (change(best.scores[name], now.scores[name]) for name in ("proxy", "heldout"))
    return best, proxy, heldout


def canary_shift(look: Look, start: Look, columns: Mapping[str, Column]) -> tuple[str, float]:
    """The column whose scores of the canaries have changed most, and its mean absolute change as a share of its range.

    NaN where no canary has a score in both looks.
    """
    shifts = {}
    for name, scores in look.canaries.items():
        width = columns[name].high - columns[name].low
        shift = (scores - start.canaries[name]).abs().double().nanmean().item() / width
        if not math.isnan(shift):
            shifts[name] = shift
    return max(shifts.items(), key=lambda item: item[1]) if shifts else ("", math.nan)


def diversity_ratio(diversity: Sequence[float], window: int) -> float:
    """The mean over the last ``window`` steps over that of the first; NaN until there are twice as many."""
    known = [value for value in diversity if not math.isnan(value)]
    if len(known) < 2 * window:
        return math.nan
    first = math.fsum(known[:window])
    return math.fsum(known[-window:]) / first if first > 0 else math.nan


def _parted(looks: Sequence[Look], rule: HeldOutJudge) -> str | None:
    best, proxy, heldout = since_best(looks)
    if not (heldout.sigmas < -rule.sigmas and proxy.mean >= 0):
        return None
    return (
        f"the reward and the held-out judge part ways: since step {best.step} the held-out judge's mean fell by "
        f"{-heldout.mean:.3g} ({-heldout.sigmas:.1f} standard errors), while the reward's rose by {proxy.mean:.3g}"
    )


def _other_judge(looks: Sequence[Look], columns: Mapping[str, Column], limit: float) -> str | None:
    name, shift = canary_shift(looks[-1], looks[0], columns)
    if not shift > limit:
        return None
    return f"the judge itself has changed: the same pictures get other scores than at the start, {name} by {shift:.1%} of its range"


def _painted(looks: Sequence[Look], limit: float) -> str | None:
    start, now = _means("painted_text", looks)
    if not now - start > limit:
        return None
    return f"{now:.0%} of the pictures show text that speaks to a judge, {start:.0%} at the start"


def _uniform(diversity: Sequence[float], rule: Diversity) -> str | None:
    ratio = diversity_ratio(diversity, rule.window)
    if not ratio < rule.limit:
        return None
    return f"the pictures of a group grow alike: their difference is {ratio:.0%} of what it was in the first {rule.window} steps"


def _shift(name: str, looks: Sequence[Look], rule: Shift) -> str | None:
    start, now = _means(name, looks)
    moved = start - now if name == "preservation" else abs(now - start)
    if not moved > rule.limit:
        return None
    what = "the source outside the mask is no longer kept" if name == "preservation" else f"the pictures' {name} has moved"
    return f"{what}: from {start:.3f} at the start to {now:.3f}"


def _factor(name: str, looks: Sequence[Look], rule: Factor) -> str | None:
    start, now = _means(name, looks)
    if not (now > start * rule.limit or now < start / rule.limit):
        return None
    return f"the pictures' {name} has moved: from {start:.3g} at the start to {now:.3g}"


def _means(name: str, looks: Sequence[Look]) -> tuple[float, float]:
    """Of the start and of now, over the tasks that both know; NaN where there are none."""
    start, now = looks[0].scores[name].double(), looks[-1].scores[name].double()
    known = ~(start.isnan() | now.isnan())
    return start[known].mean().item(), now[known].mean().item()
