"""What a check measures: values with their bounds, and the verdict of the check."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measured value. ``ok``: whether the value is within its ``bound``; None without a bound."""

    name: str
    value: float
    unit: str = ""
    bound: str = ""
    ok: bool | None = None


FOUND = "found.jsonl"
"""The file into which the process of a check writes its values."""


class NotRun(Exception):
    """A check cannot run on this machine; the message says why."""


def measured(name: str, value: float, unit: str = "") -> Finding:
    """A value without a bound."""
    return Finding(name=name, value=float(value), unit=unit)


def at_most(name: str, value: float, limit: float | None, unit: str = "") -> Finding:
    """A value that passes if it is at most ``limit``; NaN fails. Without a limit, it has no bound."""
    if limit is None:
        return measured(name, value, unit)
    return Finding(name=name, value=float(value), unit=unit, bound=f"at most {limit:.4g}", ok=bool(value <= limit))


def at_least(name: str, value: float, limit: float | None, unit: str = "") -> Finding:
    """A value that passes if it is at least ``limit``; NaN fails. Without a limit, it has no bound."""
    if limit is None:
        return measured(name, value, unit)
    return Finding(name=name, value=float(value), unit=unit, bound=f"at least {limit:.4g}", ok=bool(value >= limit))


def near(name: str, value: float, expected: float, *, share: float, unit: str = "") -> Finding:
    """A value that passes if it differs from ``expected`` by at most ``share`` times ``expected``."""
    ok = abs(value - expected) <= share * abs(expected)
    return Finding(name=name, value=float(value), unit=unit, bound=f"{expected:.4g} within {share:.0%}", ok=bool(ok))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The verdict of a check. ``why``: the reason if the check did not pass, else empty. ``seconds``: how long the check ran."""

    check: str
    status: Status
    why: str
    seconds: float
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(check: str, findings: Sequence[Finding], *, error: str | None, seconds: float) -> Result:
    """The result of a check that ran. ``error``: how the check ended if it did not return normally."""
    beyond = [f"{each.name} is {each.value:.4g}, {each.bound}" for each in findings if each.ok is False]
    if error is None and not findings:
        error = "it measured nothing"
    why = "; ".join([*([] if error is None else [error]), *beyond])
    return Result(check=check, status="fail" if why else "pass", why=why, seconds=seconds, findings=tuple(findings))


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table: a row for each check, followed by a row for each value of the check."""
    lines = ["| check | value | bound | verdict |", "| --- | --- | --- | --- |"]
    for result in results:
        why = f": {_cell(result.why)}" if result.why else ""
        lines.append(f"| **{result.check}** | {result.seconds:.0f} s | | **{result.status}**{why} |")
        for each in result.findings:
            mark = "" if each.ok is None else "pass" if each.ok else "fail"
            value = f"{each.value:.4g} {each.unit}".strip()
            lines.append(f"| {_cell(each.name)} | {value} | {each.bound} | {mark} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """The text on one line of at most 300 characters, without the character that would end a table cell."""
    return " ".join(text.split()).replace("|", "/")[:300]
