"""What a run tells to the process that drives it: its steps, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.training.evaluation import EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A training step that is done. ``step``: counted from 1; ``steps``: of the whole run. ``metrics``: as in ``metrics.jsonl``."""

    step: int
    steps: int
    phase: str
    metrics: Mapping[str, float]


class Listener:
    """Is called on every rank. The base class ignores everything."""

    def stepped(self, result: StepResult) -> None:
        """A step is done and recorded; it is not evaluated or saved yet."""

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        """The held-out tasks were evaluated after ``step`` steps."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """A checkpoint was written to this folder."""
