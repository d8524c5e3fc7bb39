"""What is wrong with a row of data, said with its file and line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to know about a data set.

    ``file``: the metadata file (or the data set's id); ``line``: counted from 1, and 0 for the file as a whole. An ``error``
    makes its row unusable; a ``note`` says how the row is read.
    """

    file: str
    line: int
    what: str
    severity: Literal["error", "note"] = "error"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.severity}: {self.what}"


class BadRow(ValueError):
    """A row that cannot be made into a task. ``problems``: everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
