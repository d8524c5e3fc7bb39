"""The result of one check, and its format: one aligned line, further lines indented below the text."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "FAILED", "note"]
_SUBJECT = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``fix`` of a failure: the command to type next, or options to add to this ``retouch doctor`` command
    if it starts with ``--``. ``then``: options that this command needs after ``fix`` was run."""

    status: Status
    subject: str
    text: str
    fix: str = ""
    then: str = ""

    def __str__(self) -> str:
        first, *more = self.text.splitlines()
        margin = " " * (6 + 2 + _SUBJECT + 2)
        return "\n".join([f"{self.status:<6}  {self.subject:<{_SUBJECT}}  {first}", *(margin + line for line in more)])


def ok(subject: str, text: str) -> Finding:
    """The finding of a check that passed."""
    return Finding("ok", subject, text)


def note(subject: str, text: str) -> Finding:
    """Information for the user that does not prevent the run."""
    return Finding("note", subject, text)


def failed(subject: str, text: str, *, fix: str, then: str = "") -> Finding:
    """The finding of a check that failed; the run would fail too."""
    return Finding("FAILED", subject, text, fix, then)


def gigabytes(count: float) -> str:
    """Bytes as GB (1e9 bytes), with two decimals."""
    return f"{count / 1e9:.2f} GB"


def duration(hours: float) -> str:
    """Text of a duration that is given in hours, in h, min or s."""
    for size, unit in ((1.0, "h"), (1 / 60, "min")):
        if hours >= size:
            return f"{hours / size:.1f} {unit}"
    return f"{hours * 3600:.2f} s"
