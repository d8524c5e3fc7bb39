"""What it took to score a sample elsewhere: what a client knows and the scores do not say."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from retouch.types import Sample, Scores


@dataclass(frozen=True, slots=True)
class Receipt:
    """``seconds``: that it took, with waiting. ``faults``: why attempts failed, in order."""

    seconds: float
    faults: tuple[str, ...] = ()
    attempts: int = 1


@runtime_checkable
class Receipted(Protocol):
    """A reward that can say what each sample took."""

    def submit_receipted(self, samples: Sequence[Sample]) -> "Future[tuple[Scores, list[Receipt]]]":
        """The scores as ``submit`` gives them, and a receipt for each sample."""
        ...
