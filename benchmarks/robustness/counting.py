"""What a suite of hostile payloads or replies found."""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path += [str(TESTS / "support"), str(TESTS / "serving"), str(TESTS.parent / "benchmarks" / "serving")]


@dataclass
class Counts:
    """``lost``: cases after which work or a sample was gone. ``wrong``: not refused, or a wrong result."""

    cases: int = 0
    lost: int = 0
    wrong: int = 0
    tracebacks: int = 0
    notes: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    def finish(self, what: str) -> int:
        """Print the notes and a summary, which is the last line; the exit code: 1 if anything went wrong."""
        summary = f"{self.cases} {what}: {self.lost} lost, {self.wrong} wrong, {self.tracebacks} tracebacks"
        print(*self.notes, "; ".join([summary, *self.measured]), sep="\n")
        return int(bool(self.lost or self.wrong or self.tracebacks))


def silence() -> None:
    """Clients say in their log what they refuse; here it is counted."""
    logging.disable(logging.WARNING)
