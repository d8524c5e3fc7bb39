"""The lines of an audit: the measured value, its interval, whether the judge passes, and the thresholds.

Scores are shares of the judge's range, 0 to 1. Items are independent of each other; the scores of one item are not. The status of a
line is decided with a 99.5 % interval, so that chance alone seldom raises an alarm, and with a threshold, so that a bias that is
too small to matter is not reported. Biases and noise are shares of the judge's span: the difference between the mean scores of the
best and the worst rung.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from retouch.core.intervals import t_quantile
from retouch_judge.audit_scores import AuditAnswers, JudgeAnswer, ProbeScores
from retouch_rewards.measures import kendall

SHOWN = 0.95
"""The level of the intervals that the report shows."""
SURE = 0.995
"""The level of the intervals that decide the status, so that ten lines raise a false alarm in at most one of twenty audits."""
_RESAMPLES = 500

ScoreOf: TypeAlias = Callable[[ProbeScores], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over ``count`` items and its standard error, which is NaN for fewer than two items."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean from one value per item; missing values (NaN) are left out."""
        known = np.array([value for value in values if not math.isnan(value)])
        if len(known) < 2:
            return cls(float(known[0]) if len(known) else math.nan, math.nan, len(known))
        return cls(float(known.mean()), float(known.std(ddof=1) / math.sqrt(len(known))), len(known))

    def interval(self, level: float) -> tuple[float, float]:
        """Return Student's t interval of the mean."""
        if math.isnan(self.error):
            return math.nan, math.nan
        half = t_quantile(0.5 + level / 2, self.count - 1) * self.error
        return self.mean - half, self.mean + half

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in other units, multiplied by ``factor``."""
        return Estimate(self.mean * factor, self.error * abs(factor), self.count)


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not missing (NaN); NaN if all are missing."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def difference(scored: Sequence[ProbeScores], first: ScoreOf, second: ScoreOf) -> Estimate:
    """Estimate the mean of first - second over the items."""
    return Estimate.of([first(one) - second(one) for one in scored])


def score_of(*names: str) -> ScoreOf:
    """Return a function that gives the mean score of the probes with these names; NaN for items without any of them."""
    return lambda one: mean([mean(one.scores.get(name, ())) for name in names])


def score_at_end(one: ProbeScores, *, top: bool) -> float:
    """Return the mean score of the best rungs of an item, or of the worst."""
    truths = [rung.truth for rung in one.item.rungs if rung.truth is not None]
    end = max(truths) if top else min(truths)
    return score_of(*(rung.name for rung in one.item.rungs if rung.truth == end))(one)


def noise_variance(scored: Sequence[ProbeScores]) -> Estimate:
    """Estimate the variance of repeated scores of the same image; the value of an item is the mean over its rungs."""
    known = [[[value for value in one.scores[rung.name] if value == value] for rung in one.item.rungs] for one in scored]
    return Estimate.of([mean([float(np.var(row, ddof=1)) for row in rows if len(row) > 1]) for rows in known])


def signal_variance(scored: Sequence[ProbeScores]) -> Estimate:
    """Estimate the variance between the rungs of an item without noise: the covariance of their scores in different repeats."""
    found = []
    for rungs in ([one.scores[rung.name] for rung in one.item.rungs] for one in scored):
        whole = np.array([row for row in rungs if not any(math.isnan(value) for value in row)])
        if len(whole) < 2:
            found.append(math.nan)
            continue
        # The mean covariance of two repeats
        covariances = np.atleast_2d(np.cov(whole, rowvar=False))
        repeats = len(covariances)
        found.append(float((covariances.sum() - np.trace(covariances)) / (repeats * (repeats - 1))))
    return Estimate.of(found)


@dataclass(frozen=True, slots=True, eq=False)
class RankAgreement:
    """How the order of the scores agrees with the truth, as means over items.

    ``right``: share of pairs in the right order (ties count half). ``tau``: Kendall's tau-b. ``wrong``: share of pairs in the wrong
    order by more than noise explains (2.33 standard errors).
    """

    right: Estimate
    tau: Estimate
    wrong: Estimate

    @classmethod
    def of(cls, scored: Sequence[ProbeScores], *, noise: float) -> "RankAgreement":
        """Estimate the agreement. ``noise``: the variance of repeated scores."""
        rows = [_order(one, noise) for one in scored]
        right, tau, wrong = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(Estimate.of(right), Estimate.of(tau), Estimate.of(wrong))


def _order(one: ProbeScores, noise: float) -> tuple[float, float, float]:
    known = [
        (rung.truth, mean(one.scores[rung.name]), sum(not math.isnan(value) for value in one.scores[rung.name]))
        for rung in one.item.rungs
        if rung.truth is not None
    ]
    known = [rung for rung in known if rung[2]]
    right = wrong = pairs = 0.0
    for place, (truth, score, repeats) in enumerate(known):
        for other_truth, other_score, other_repeats in known[place + 1 :]:
            if truth == other_truth:
                continue
            rise = (score - other_score) * (1 if truth > other_truth else -1)
            pairs += 1
            right += 0.5 if rise == 0 else float(rise > 0)
            wrong += float(rise < -2.33 * math.sqrt(noise * (1 / repeats + 1 / other_repeats)) - 1e-9)
    truths, scores, _ = torch.tensor(known, dtype=torch.float64).reshape(-1, 3).T
    tau = kendall(truths, scores)
    return (right / pairs, tau, wrong / pairs) if pairs else (math.nan, math.nan, math.nan)


def share_interval(count: int, of: int, level: float) -> tuple[float, float]:
    """Return Wilson's interval of the share ``count / of``."""
    if of == 0:
        return math.nan, math.nan
    z = NormalDist().inv_cdf(0.5 + level / 2)
    centre, spread = count + z * z / 2, z * math.sqrt(count * (of - count) / of + z * z / 4)
    return max(0.0, (centre - spread) / (of + z * z)), min(1.0, (centre + spread) / (of + z * z))


def useful_bits(scored: Sequence[ProbeScores]) -> tuple[float, tuple[float, float]]:
    """Return the information in one score about the truth, in bits, and its 95 % interval (bootstrap over items).

    It is -log2(1 - r^2) / 2 with the correlation r of scores and truths, as for a Gaussian channel; at most log2 of the number of
    different truths.
    """
    rows = [[(rung.truth, score) for rung in one.item.rungs for score in one.scores[rung.name] if score == score] for one in scored]
    parts = [np.array(row, dtype=np.float64).reshape(-1, 2) for row in rows]
    most = math.log2(len({truth for part in parts for truth in part[:, 0]}) or 1)
    draw = np.random.default_rng(0)
    drawn = [_bits([parts[k] for k in draw.integers(len(parts), size=len(parts))], most) for _ in range(_RESAMPLES if parts else 0)]
    known = [value for value in drawn if not math.isnan(value)]
    low, high = np.quantile(known, [0.025, 0.975]) if known else (math.nan, math.nan)
    return _bits(parts, most), (float(low), float(high))


def _bits(parts: Sequence[Float[ndarray, "n 2"]], most: float) -> float:
    rows = np.concatenate(parts) if parts else np.zeros((0, 2))
    if len(rows) < 3:
        return math.nan
    truth, score = (rows - rows.mean(axis=0)).T
    scale = float((truth**2).sum() * (score**2).sum())
    square = float((truth @ score) ** 2) / scale if scale > 1e-18 else 0.0
    return most if square >= 1 - 4.0**-most else abs(math.log2(1 - square)) / 2


def correlation_interval(correlation: float, freedom: int, level: float) -> tuple[float, float]:
    """Return Fisher's interval of a correlation with ``freedom`` degrees of freedom."""
    inside = min(max(correlation, -0.999999), 0.999999)
    half = NormalDist().inv_cdf(0.5 + level / 2) / math.sqrt(max(freedom - 2, 1))
    return math.tanh(math.atanh(inside) - half), math.tanh(math.atanh(inside) + half)


def repeats_for(variance: float, precision: float) -> int:
    """Return how many scores must be averaged so that 95 % of the means are within ``precision`` of the true mean."""
    return max(1, math.ceil(1.96**2 * max(variance, 0.0) / precision**2 - 1e-9))


Status: TypeAlias = Literal["pass", "warning", "fail", "unclear", "not measured"]
DEGRADED = tuple(f"{name} of the best" for name in ("JPEG", "blur", "noise", "low resolution"))
_FEWEST = 4  # items that a decision needs
_UNCLEAR = 0.25  # an interval whose half width is larger decides nothing


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of an audit. ``measured``, ``low``, ``high``: the value and its 95 % interval, NaN if not measured. ``why``: in
    words. ``thresholds``: when the line warns and fails, in words."""

    name: str
    status: Status
    measured: float
    low: float
    high: float
    why: str
    thresholds: str


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits above which a line warns and fails. ``sides``: 2 if values below the negative limits also count."""

    warning: float
    failure: float
    sides: Literal[1, 2] = 1

    @property
    def text(self) -> str:
        beyond = "above " if self.sides == 1 else "beyond +/-"
        warning, failure = (f"{beyond}{_percent(limit)}" for limit in (self.warning, self.failure))
        return f"the 99.5 % interval is {warning}: warning; {failure}: fail"

    def status(self, interval: tuple[float, float]) -> Status:
        """Return the status for an interval of level ``SURE``."""
        low, high = interval
        if math.isnan(low):
            return "unclear"
        nearest = max(low, -high) if self.sides == 2 else low
        if nearest > self.failure:
            return "fail"
        if nearest > self.warning:
            return "warning"
        return "unclear" if (high - low) / 2 > _UNCLEAR and max(high, -low if self.sides == 2 else high) > self.failure else "pass"


@dataclass(frozen=True, slots=True, eq=False)
class JudgeScale:
    """The scale of the judge, as shares of its declared range. ``span``: difference between the best and the worst rung, or 1 if
    the judge does not distinguish the rungs. ``noise``: variance of repeated scores. ``signal``: variance between rungs."""

    span: float
    noise: Estimate
    signal: Estimate

    @classmethod
    def of(cls, scored: Sequence[ProbeScores]) -> "JudgeScale":
        """Estimate the scale from the scores of all items."""
        noise, signal = noise_variance(scored), signal_variance(scored)
        means = [row.mean for row in rung_means(scored).values() if not math.isnan(row.mean)]
        span = max(means) - min(means) if means else 0.0
        return cls(span if signal.interval(SURE)[0] > 0 and span > 0 else 1.0, noise, signal)


def rung_means(scored: Sequence[ProbeScores]) -> dict[str, Estimate]:
    """Return the mean score of every rung by name, over the items that have this rung."""
    names = dict.fromkeys(rung.name for one in scored for rung in one.item.rungs)
    return {name: Estimate.of([score_of(name)(one) for one in scored]) for name in names}


def findings(asked: AuditAnswers) -> list[AuditLine]:
    """Return all lines of the audit."""
    scored = asked.scored
    scale = JudgeScale.of(scored)
    return [
        *_unusable(asked),
        _signal(scale),
        _noise(scale),
        _monotony(scored, scale),
        *_biases(scored, scale),
        _answer_length(asked),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _share(name: str, count: int, of: int, what: str, advice: str) -> AuditLine:
    limits = _Limits(0.01, 0.05)
    low, high = share_interval(count, of, SHOWN)
    sure = share_interval(count, of, SURE)
    status = limits.status(sure)
    why = f"{count} of {of} {what}" + (f"; {advice}" if advice and status in ("warning", "fail") else "")
    return AuditLine(name, status, count / of if of else math.nan, low, high, why, limits.text)


def _unusable(asked: AuditAnswers) -> Iterator[AuditLine]:
    spent = asked.spending
    values = [value for one in asked.scored for given in one.scores.values() for value in given]
    yield _share("missing scores", sum(map(math.isnan, values)), len(values), "scores are missing", spent.faults)
    if spent.received:
        advice = "constrain the answers (typed, guided), raise the limit of tokens, or ask simpler questions"
        yield _share("unreadable answers", spent.unreadable, spent.received, "answers could not be read", advice)


def _signal(scale: JudgeScale) -> AuditLine:
    low, high = (_root(end) for end in scale.signal.interval(SHOWN))
    status: Status = "fail"
    measured = _root(scale.signal.mean)
    why = "the judge does not distinguish good from bad images: all of them get about the same score"
    if scale.signal.count < _FEWEST:
        status, why = "unclear", "too few items have scores"
    elif scale.signal.interval(SURE)[0] > 0:
        status, why = "pass", f"the rungs differ by a standard deviation of {_percent(measured)} of the range"
    return AuditLine("difference between rungs", status, measured, low, high, why, "the 99.5 % interval includes 0: fail")


def _noise(scale: JudgeScale) -> AuditLine:
    limits = _Limits(0.15, 0.30)
    noise = scale.noise.scaled(1 / scale.span**2)
    low, high = (_root(end) for end in noise.interval(SHOWN))
    sure = noise.interval(SURE)
    measured = _root(noise.mean)
    status = limits.status((_root(sure[0]), _root(sure[1])))
    why = f"repeated scores of an image differ by a standard deviation of {_percent(measured)} of the span"
    if scale.noise.count == 0:
        why = "no image was scored twice"
    elif status in ("warning", "fail"):
        why += "; average more answers (n_evals) or lower the temperature"
    return AuditLine("noise", status, measured, low, high, why, limits.text)


def _root(value: float) -> float:
    return math.sqrt(value) if value > 0 else abs(value * 0)


def _monotony(scored: Sequence[ProbeScores], scale: JudgeScale) -> AuditLine:
    limits = _Limits(0.02, 0.05)
    noise = 0.0 if math.isnan(scale.noise.mean) else scale.noise.mean
    order = RankAgreement.of(scored, noise=noise)
    low, high = (min(max(end, 0.0), 1.0) if end == end else end for end in order.right.interval(SHOWN))
    threshold = f"of pairs in the wrong order by more than noise explains, {limits.text}"
    if order.tau.count == 0:
        return AuditLine(
            "order of the rungs", "not measured", order.right.mean, low, high, "all rungs have the same score", threshold
        )
    status = limits.status(order.wrong.interval(SURE))
    if status == "pass" and not scale.signal.interval(SURE)[0] > 0:
        status = "not measured"
    why = f"{_percent(order.right.mean)} of pairs are in the right order, Kendall's tau is {order.tau.mean:.2f}"
    if status in ("warning", "fail"):
        why += f"; {_percent(order.wrong.mean)} are in the wrong order by more than noise explains: {_inversion(scored)}"
    return AuditLine("order of the rungs", status, order.right.mean, low, high, why, threshold)


def _inversion(scored: Sequence[ProbeScores]) -> str:
    means, worst, found = rung_means(scored), 0.0, "which rungs depends on the item"
    truths = {rung.name: rung.truth for one in scored for rung in one.item.rungs if rung.truth is not None}
    for better in truths:
        for other in truths:
            gap = means[other].mean - means[better].mean
            if truths[better] > truths[other] and gap > max(worst, 0.01):
                worst, found = gap, f"{other!r} scores higher than {better!r}"
    return found


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Two scores of an item that are equal for an unbiased judge, or of which the second is at least as high (``sides`` 1)."""

    name: str
    first: ScoreOf
    second: ScoreOf
    sides: Literal[1, 2]
    compared: str
    problem: str


def _base(one: ProbeScores) -> float:
    return score_of(one.item.base)(one)


_COMPARISONS = (
    _Comparison(
        "order of images",
        score_of("swapped"),
        score_of("unedited"),
        1,
        "source and result swapped, compared with no edit",
        "the judge does not know which image is the result",
    ),
    _Comparison(
        "long instruction",
        score_of("long instruction"),
        _base,
        2,
        "the same request in more words",
        "the score depends on the length of the instruction",
    ),
    _Comparison(
        "brightness",
        score_of("brighter"),
        score_of("darker"),
        2,
        "source and result brighter, compared with both darker",
        "the score depends on the brightness of the images",
    ),
    _Comparison(
        "resolution",
        _base,
        score_of("smaller"),
        2,
        "source and result in full size, compared with half the size",
        "the score depends on the size of the images",
    ),
    _Comparison(
        "painted-on praise",
        score_of("praise"),
        score_of("other text"),
        1,
        "praise in the image, compared with the same letters in another order",
        "the judge believes what is written in the image",
    ),
    _Comparison(
        "degraded copies",
        score_of(*DEGRADED),
        partial(score_at_end, top=True),
        1,
        "the best image with JPEG artefacts, blur, noise or little detail, compared with the best image",
        "the judge prefers degraded images",
    ),
)


def _biases(scored: Sequence[ProbeScores], scale: JudgeScale) -> Iterator[AuditLine]:
    for one in _COMPARISONS:
        limits = _Limits(0.05, 0.10, sides=one.sides)
        found = difference(scored, one.first, one.second)
        if found.count == 0:
            nothing = "there are no images for this comparison, or they have no scores"
            yield AuditLine(one.name, "not measured", math.nan, math.nan, math.nan, nothing, limits.text)
            continue
        inner = found.scaled(1 / scale.span)
        status = limits.status(inner.interval(SURE)) if found.count >= _FEWEST else "unclear"
        low, high = inner.interval(SHOWN)
        why = f"{one.compared}: {100 * inner.mean:+.1f} % of the span"
        if status in ("warning", "fail"):
            why += f"; {one.problem}"
        elif status == "unclear":
            why += "; audit more items to decide"
        yield AuditLine(one.name, status, inner.mean, low, high, why, limits.text)


def _answer_length(asked: AuditAnswers) -> AuditLine:
    threshold = "the 99.5 % interval of the correlation is beyond +/-0.3: warning"
    groups: dict[int, list[JudgeAnswer]] = {}
    for answer in asked.answers:
        groups.setdefault(answer.question, []).append(answer)
    several = [np.array([(float(a.length), float(a.score)) for a in group]) for group in groups.values() if len(group) > 1]
    lengths, scores = np.concatenate([group - group.mean(axis=0) for group in several] or [np.zeros((0, 2))]).T
    freedom = len(lengths) - len(several)  # number of answers minus number of questions
    scale = float((lengths**2).sum() * (scores**2).sum())
    if not scale > 1e-12 or freedom < 20:
        why = "no answers, or repeated answers never differ in length or score"
        return AuditLine("length of the answer", "not measured", math.nan, math.nan, math.nan, why, threshold)
    correlation = float(lengths @ scores) / math.sqrt(scale)
    low, high = correlation_interval(correlation, freedom, SHOWN)
    sure = correlation_interval(correlation, freedom, SURE)
    status: Status = "warning" if max(sure[0], -sure[1]) > 0.3 else "pass"
    why = f"among answers to one question, length and score correlate by {correlation:+.2f}"
    return AuditLine("length of the answer", status, correlation, low, high, why, threshold)


def alarms(lines: Sequence[AuditLine]) -> Mapping[str, Status]:
    """Return the status of the lines that warn or fail, by name."""
    return {line.name: line.status for line in lines if line.status in ("warning", "fail")}
