"""What a check of the doctor found, and how it is written down: one aligned line each, further lines below the text."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "FAILED", "note"]
_SUBJECT = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """``mend`` of a failure: the command to type, or, where it begins with ``--``, what to add to the doctor's own."""

    status: Status
    subject: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        first, *more = self.text.splitlines()
        margin = " " * (6 + 2 + _SUBJECT + 2)
        return "\n".join([f"{self.status:<6}  {self.subject:<{_SUBJECT}}  {first}", *(margin + line for line in more)])


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def note(subject: str, text: str) -> Finding:
    """Something to know; it does not stand in the way."""
    return Finding("note", subject, text)


def failed(subject: str, text: str, *, mend: str) -> Finding:
    return Finding("FAILED", subject, text, mend)


def gigabytes(count: float) -> str:
    """Bytes as GB (1e9), to two digits after the point."""
    return f"{count / 1e9:.2f} GB"
