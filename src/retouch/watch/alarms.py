"""Alarms: each rule of a recipe's ``watch`` is a pure function of the observations so far.

Because alarms depend on nothing else, a resumed run raises the same alarms as an uninterrupted run.
"""

import math
from collections.abc import Mapping, Sequence

from retouch.assembly.hooks import Alarm
from retouch.core.intervals import MeanEstimate
from retouch.recipe.watch import Diversity, Factor, HeldOutJudge, Shift, Watch
from retouch.types import Column
from retouch.watch.observations import Observation, paired_change


def find_alarms(
    watch: Watch, observations: Sequence[Observation], diversity: Sequence[float], columns: Mapping[str, Column]
) -> list[Alarm]:
    """Return the alarms at the last observation. The first observation was made before training.

    ``diversity``: the group diversity of every step so far. ``columns``: the reward's columns, in which the canaries are scored.
    """
    found = {}
    for name, rule in watch.rules.items():
        match rule:
            case HeldOutJudge():
                found[name] = _judge_alarm(observations, rule)
            case Diversity():
                found[name] = _diversity_alarm(diversity, rule)
            case Factor():
                found[name] = _factor_alarm(name, observations, rule)
            case Shift():
                found[name] = _shift_alarm(name, observations, rule)
    if watch.canaries is not None:
        found["canaries"] = _canary_alarm(observations, columns, watch.canaries.limit)
    if watch.text is not None:
        found["text"] = _text_alarm(observations, watch.text.limit)
    rules = watch.rules
    return [Alarm(name, text, rules[name].on_alarm) for name, text in found.items() if text is not None]


def since_best(observations: Sequence[Observation]) -> tuple[Observation, MeanEstimate, MeanEstimate]:
    """Return the observation with the best held-out score, and the changes of the training reward and of the held-out score since.

    Source: the signature of reward over-optimisation (Gao et al. 2022, arXiv 2210.10760).
    """
    best = max(observations, key=lambda each: -math.inf if math.isnan(each.mean("heldout")) else each.mean("heldout"))
    now = observations[-1]
    proxy, heldout = (paired_change(best, now, name) for name in ("proxy", "heldout"))
    return best, proxy, heldout


def canary_shift(observation: Observation, start: Observation, columns: Mapping[str, Column]) -> tuple[str, float]:
    """Return the column whose canary scores changed most since ``start``, and its mean absolute change as a fraction of its range.

    The change is NaN if no canary has a score in both observations.
    """
    shifts = {}
    for name, scores in observation.canaries.items():
        width = columns[name].high - columns[name].low
        shift = (scores - start.canaries[name]).abs().double().nanmean().item() / width
        if not math.isnan(shift):
            shifts[name] = shift
    return max(shifts.items(), key=lambda item: item[1]) if shifts else ("", math.nan)


def diversity_ratio(diversity: Sequence[float], window: int) -> float:
    """Return the mean of the last ``window`` steps divided by the mean of the first ``window``; NaN before 2 * ``window`` steps."""
    known = [value for value in diversity if not math.isnan(value)]
    if len(known) < 2 * window:
        return math.nan
    first = math.fsum(known[:window])
    return math.fsum(known[-window:]) / first if first > 0 else math.nan


def _judge_alarm(observations: Sequence[Observation], rule: HeldOutJudge) -> str | None:
    best, proxy, heldout = since_best(observations)
    if not (heldout.sigmas < -rule.sigmas and proxy.mean >= 0):
        return None
    return (
        f"the reward and the held-out judge diverge: since step {best.step} the mean score of the held-out judge fell by "
        f"{-heldout.mean:.3g} ({-heldout.sigmas:.1f} standard errors), while the mean reward rose by {proxy.mean:.3g}"
    )


def _canary_alarm(observations: Sequence[Observation], columns: Mapping[str, Column], limit: float) -> str | None:
    name, shift = canary_shift(observations[-1], observations[0], columns)
    if not shift > limit:
        return None
    return f"the judge itself has changed: the same images get other scores than at the start, {name} by {shift:.1%} of its range"


def _text_alarm(observations: Sequence[Observation], limit: float) -> str | None:
    start, now = _means("text_to_judge", observations)
    if not now - start > limit:
        return None
    return f"{now:.0%} of the images contain text that addresses a judge, {start:.0%} at the start"


def _diversity_alarm(diversity: Sequence[float], rule: Diversity) -> str | None:
    ratio = diversity_ratio(diversity, rule.window)
    if not ratio < rule.limit:
        return None
    return f"the images of a group become alike: their difference is {ratio:.0%} of that in the first {rule.window} steps"


def _shift_alarm(name: str, observations: Sequence[Observation], rule: Shift) -> str | None:
    start, now = _means(name, observations)
    shift = start - now if name == "preservation" else abs(now - start)
    if not shift > rule.limit:
        return None
    what = "the source outside the mask is no longer preserved" if name == "preservation" else f"the images' {name} has changed"
    return f"{what}: from {start:.3f} at the start to {now:.3f}"


def _factor_alarm(name: str, observations: Sequence[Observation], rule: Factor) -> str | None:
    start, now = _means(name, observations)
    if not (now > start * rule.limit or now < start / rule.limit):
        return None
    return f"the {name} of the images has changed: from {start:.3g} at the start to {now:.3g}"


def _means(name: str, observations: Sequence[Observation]) -> tuple[float, float]:
    """Return the means of the first and the last observation over the tasks that both scored; NaN if there are none."""
    start, now = observations[0].scores[name].double(), observations[-1].scores[name].double()
    known = ~(start.isnan() | now.isnan())
    return start[known].mean().item(), now[known].mean().item()
