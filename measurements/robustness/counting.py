"""Counts of the failures that a suite of hostile payloads or replies found."""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path += [str(TESTS / "support"), str(TESTS / "serving"), str(TESTS.parent / "measurements" / "serving")]


@dataclass
class Counts:
    """Counts of a suite. ``lost``: cases that lost work or a sample. ``wrong``: cases that gave a wrong result or no refusal."""

    cases: int = 0
    lost: int = 0
    wrong: int = 0
    tracebacks: int = 0
    notes: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    def finish(self, what: str) -> int:
        """Print the notes, then a summary as the last line. Returns the exit code: 1 if anything went wrong, else 0."""
        summary = f"{self.cases} {what}: {self.lost} lost, {self.wrong} wrong, {self.tracebacks} tracebacks"
        print(*self.notes, "; ".join([summary, *self.measured]), sep="\n")
        return int(bool(self.lost or self.wrong or self.tracebacks))


def silence() -> None:
    """Disable log messages up to warnings: clients log each reply that they refuse, and the suite counts these anyway."""
    logging.disable(logging.WARNING)
