"""The result of an audit, as JSON and as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retouch.records.files import jsonable
from retouch_bench.judges.findings import AuditLine, alarms


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
        rows += [(line.status, *_numbers(line), f"{line.name}: {line.why}") for line in self.lines]
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


def _numbers(line: AuditLine) -> tuple[str, str]:
    """Format the value and its interval as percentages; a dash if not measured."""
    value = "-" if math.isnan(line.measured) else f"{100 * line.measured:.1f} %"
    return value, "-" if math.isnan(line.low) else f"{100 * line.low:.1f} to {100 * line.high:.1f} %"
