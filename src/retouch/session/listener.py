"""Callbacks of a run: they report its steps, evaluations and checkpoints to the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.training.evaluation import EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A finished training step. ``step``: its number, from 1. ``steps``: the number of steps of the run. ``metrics``: the metrics
    that ``metrics.jsonl`` stores."""

    step: int
    steps: int
    phase: str
    metrics: Mapping[str, float]


class Listener:
    """Callbacks of a run, called on every rank. The base class ignores all of them."""

    def resumed(self, step: int) -> None:
        """Called before the first step if the run was already trained for ``step`` steps; the records in its folder end there. Also
        called if these are all steps of the run."""

    def stepped(self, result: StepResult) -> None:
        """Called after a step is recorded, before it is evaluated or saved."""

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        """Called after the held-out tasks were evaluated at ``step`` finished steps."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """Called after a checkpoint was written to the folder ``checkpoint``."""
