"""``retouch tools audit``: scores images of known quality with a judge, and reports its faults, before a run pays for it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from retouch.config import wings
from retouch.distributed.ranks import scoring_device
from retouch.protocols import Reward
from retouch.recipe.reward_arguments import default_name, modules_in_argument, parse_reward, read_combined
from retouch.records.files import jsonable, write_json
from retouch.rewards.base import RewardSection
from retouch.rewards.combination import Combination, combination
from retouch_judge.audit_findings import SHOWN, AuditLine, JudgeScale, alarms, findings, repeats_for, rung_means, useful_bits
from retouch_judge.audit_ladders import PLAYGROUND_SIDE, Item, playground_ladders, read_ladders
from retouch_judge.audit_scores import AuditAnswers, LimitedClients, ask
from retouch_worlds.playground.scenes import SIZE

ITEMS, REPEATS, PRECISION = 20, 3, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RungMean:
    """The mean score of a rung over the items, as a share of the judge's range, and its 95 % interval."""

    name: str
    truth: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAudit:
    """The result of an audit.

    ``scored``: the formula or column that was audited. ``left``: number of items that were not scored because the budget was spent.
    ``bits``: the information in one score about the truth; ``bits_interval``: its 95 % interval. ``repeats_needed``: how many
    answers must be averaged so that 95 % of the means are within ``precision``, a share of the span. ``requests``, ``seconds``,
    ``tokens`` and ``cost`` (dollars, None if no price is known): totals of the whole ledger. ``folder``: contains ``audit.json``,
    ``audit.html`` and ``ledger.sqlite``.
    """

    judge: str
    scored: str
    items: int
    left: int
    repeats: int
    lines: Sequence[AuditLine]
    rungs: Sequence[RungMean]
    bits: float
    bits_interval: tuple[float, float]
    precision: float
    repeats_needed: int | None
    samples: int
    requests: int
    seconds: float
    tokens: int
    cost: float | None
    folder: Path

    @property
    def failed(self) -> bool:
        """Whether a line fails, or items were not scored."""
        return self.left > 0 or any(line.status == "fail" for line in self.lines)

    @property
    def alarms(self) -> Mapping[str, str]:
        """The status of the lines that warn or fail, by name."""
        return alarms(self.lines)

    def per_bit(self, total: float) -> float:
        """Divide a total of the ledger by the useful bits of all scores; infinite if there are none."""
        useful = self.bits * self.samples
        return total / useful if useful > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON; values that were not measured are null."""
        about = {name: value for name, value in asdict(self).items() if name != "folder"}
        costs = {"dollars": None if self.cost is None else self.per_bit(self.cost), "tokens": self.per_bit(self.tokens)}
        per_bit = {name: None if value is None or math.isinf(value) else value for name, value in costs.items()}
        made: dict[str, Any] = jsonable({**about, "failed": self.failed, "per_bit": per_bit})
        return made

    def __str__(self) -> str:
        rows = [("", "measured", "95 % interval", "result")]
        for line in self.lines:
            value = "-" if math.isnan(line.measured) else f"{100 * line.measured:.1f} %"
            interval = "-" if math.isnan(line.low) else f"{100 * line.low:.1f} to {100 * line.high:.1f} %"
            rows.append((line.status, value, interval, f"{line.name}: {line.why}"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        ladder = [f"  {rung.mean:6.3f}  {rung.name} (truth {rung.truth:.3g})" for rung in self.rungs]
        parts = [f"{self.judge}, {self.scored}: {self.headline}", "", *table, "", "mean score of each rung (share of the range)"]
        return "\n".join([*parts, *ladder, "", *self.summary, f"{self.folder / 'audit.html'}"])

    @property
    def headline(self) -> str:
        """The result in one line."""
        wrong = [line.name for line in self.lines if line.status == "fail"]
        warned = [line.name for line in self.lines if line.status == "warning"]
        said = [f"fails: {', '.join(wrong)}"] if wrong else []
        said += [f"warnings: {', '.join(warned)}"] if warned else []
        return "; ".join(said) or "passes"

    @property
    def summary(self) -> list[str]:
        """Cost, information and repeats, in sentences."""
        low, high = self.bits_interval
        said = [f"One score says {self.bits:.2f} bits about the truth (95 %: {low:.2f} to {high:.2f})."]
        if self.repeats_needed is not None:
            share = f"{100 * self.precision:g} %"
            said.append(f"For a precision of {share} of the span, average {self.repeats_needed} answers.")
        if self.requests:
            spent = f"{self.requests} requests, {self.tokens} tokens" + ("" if self.cost is None else f", ${self.cost:.4f}")
            dollars = "" if self.cost is None else f" or ${self.per_bit(self.cost):.2g}"
            each = self.per_bit(self.tokens)
            useful = f"a useful bit costs {each:.0f} tokens{dollars}" if math.isfinite(each) else "no useful bit"
            said.append(f"{spent}; {useful}.")
        if self.left:
            said.append(
                f"The budget ended the audit after {self.items} of {self.items + self.left} items; the same command asks the rest."
            )
        return said


def judge_audit(
    judge: str | RewardSection,
    *,
    ladder: str | Path | None = None,
    items: int | None = None,
    repeats: int = REPEATS,
    column: str | None = None,
    precision: float = PRECISION,
    budget: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: "torch.device | str | None" = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> JudgeAudit:
    """Score images of known quality with a judge, and write ``audit.json`` and ``audit.html`` into ``out``.

    ``judge``: a reward section, or its name on a command line: ``clip:FOLDER``, JSON, a file, a recipe, a run. ``ladder``: a folder
    with ``ladder.jsonl``; None makes ladders of the playground. ``items``: number of ladders, by default 20 of the playground or
    all of the folder. ``repeats``: how often each rung is scored, at least 2. ``column``: the column to audit instead of the
    ``combine`` of the reward. ``precision``: report how many answers must be averaged for this precision, a share of the span.
    ``budget``: maximum number of requests to each endpoint of the judge in this call, including retries. ``out``: the folder of
    this judge; an interrupted audit in it is continued. ``progress``: called with the number of finished items and of all items.

    Raises ValueError if an argument is out of range, the ladder or the judge has mistakes, or no image of the first item got a
    score.

    Example::

        >>> audit = retouch.judge_audit("playground", items=2, repeats=2)
        >>> print(audit)
        playground, 1 x overall: passes
        ...
        >>> audit.failed
        False
    """
    if repeats < 2 or (items is not None and items < 1) or not 0 < precision <= 1 or (budget is not None and budget < 1):
        raise ValueError(
            f"repeats {repeats}, items {items}, precision {precision:g}, budget {budget}: give at least 2 repeats (noise is the "
            "difference between them), 1 item, a precision from 0 to 1, and a budget of at least 1"
        )
    section = (
        judge if isinstance(judge, RewardSection) else parse_reward(read_combined(judge), allow_imports=modules_in_argument(judge))
    )
    name = section.name if isinstance(judge, RewardSection) or judge.lstrip().startswith("{") else default_name(judge)
    folder = Path("runs/judge-audits", name) if out is None else Path(out)
    made = _items(section, ladder, items, seed)
    audited: list[Combination] = []

    def combined(reward: Reward) -> Combination:
        audited.append(_combination(section, reward, column))
        return audited[0]

    where = device or scoring_device()
    asked = ask(
        section,
        combined,
        made,
        repeats=repeats,
        ledger=folder / "ledger.sqlite",
        device=where,
        clients=LimitedClients(where, budget),
        progress=progress,
    )
    if not asked.scored:
        raise ValueError(f"the budget of {budget} requests does not suffice for one item; raise it with --budget")
    result = _result(name, str(audited[0]), asked, repeats=repeats, precision=precision, folder=folder)
    write_json(folder / "audit.json", result.to_json())
    wings.load("part.audit_page")(result, asked.scored[0].item)
    return result


def _items(section: RewardSection, ladder: str | Path | None, count: int | None, seed: int) -> list[Item]:
    if ladder is not None:
        found = read_ladders(Path(ladder))
        return found if count is None else found[:count]
    kinds = {kind for _, _, part in section.parts() for kind in part.data_kinds}
    if kinds - {"playground", "playground-indirect"}:
        raise ValueError(
            f"{section.name} scores only tasks of {', '.join(sorted(kinds))}; give ladders of such tasks with --ladder"
        )
    return playground_ladders(count or ITEMS, seed=seed, side=SIZE if kinds else PLAYGROUND_SIDE)


def _combination(section: RewardSection, reward: Reward, column: str | None) -> Combination:
    """Return the combination to audit. Raises ValueError if the column does not exist, or none of several is chosen."""
    columns = {name: known for name, known in reward.columns.items() if not known.diagnostic}
    if column is None and section.combine:
        return combination(section.combine, reward.columns)
    chosen = column or ("overall" if "overall" in columns else next(iter(columns)) if len(columns) == 1 else None)
    if chosen is None or chosen not in columns:
        named = "" if column is None else f"no column {column!r}; "
        raise ValueError(f"{section.name}: {named}choose one of its columns with --column: {', '.join(columns)}")
    return combination({chosen: 1.0 if columns[chosen].higher_is_better else -1.0}, reward.columns)


def _result(name: str, scored: str, asked: AuditAnswers, *, repeats: int, precision: float, folder: Path) -> JudgeAudit:
    scale = JudgeScale.of(asked.scored)
    truths = {rung.name: rung.truth for one in asked.scored for rung in one.item.rungs}
    rungs = [
        RungMean(name=rung, truth=truths[rung] or 0.0, mean=found.mean, low=found.interval(SHOWN)[0], high=found.interval(SHOWN)[1])
        for rung, found in rung_means(asked.scored).items()
    ]
    bits, interval = useful_bits(asked.scored)
    noise, spent = scale.noise.mean / scale.span**2, asked.spending
    return JudgeAudit(
        judge=name,
        scored=scored,
        items=len(asked.scored),
        left=asked.left,
        repeats=repeats,
        lines=findings(asked),
        rungs=rungs,
        bits=bits,
        bits_interval=interval,
        precision=precision,
        repeats_needed=None if math.isnan(noise) else repeats_for(noise, precision),
        samples=sum(len(given) for one in asked.scored for given in one.scores.values()),
        requests=spent.attempts.total(),
        seconds=spent.seconds,
        tokens=spent.tokens,
        cost=spent.cost,
        folder=folder,
    )
