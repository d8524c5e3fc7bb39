"""Callbacks: code of a script that runs while a ``Trainer`` trains; and the log history of its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from retouch.recipe.recipe import Recipe

if TYPE_CHECKING:
    from retouch.records.folder import RunFolder


@dataclass
class TrainerState:
    """The progress of a run. ``step``: completed steps. ``steps``: all steps of the run. ``stopped``: whether ``stop`` was called.

    ``log_history``: one entry per step with its metrics, and one per evaluation with ``eval/COLUMN`` means over the held-out tasks,
    each with ``step``. If the run is resumed, or is already finished, it begins with the entries of the earlier starts.
    """

    step: int = 0
    steps: int = 0
    stopped: bool = False
    log_history: list[dict[str, Any]] = field(default_factory=list)


class ScoreTable(dict[str, dict[str, float]]):
    """The table of an evaluation, a dictionary: row ("all", "tag=value") to column to mean; the column ``n`` counts tasks.

    ``intervals``: row to column to (low, high), the 95 % confidence interval of the mean, if the row has more than one score.
    """

    def __init__(self, means: Mapping[str, dict[str, float]], intervals: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
        super().__init__(means)
        self.intervals = intervals


class Running(Protocol):
    """A ``Trainer`` as its callbacks see it."""

    recipe: Recipe
    state: TrainerState
    is_main: bool

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        ...


class Callback:
    """Base class of callbacks: override the methods that you need. Any method may call ``trainer.stop()``: the run then ends after
    the current step, with a checkpoint. With several ranks, every rank calls its own callbacks.

    Example::

        >>> class StopEarly(retouch.Callback):
        ...     def on_step(self, trainer, step, metrics):
        ...         if metrics["reward/mean"] > 0.95:
        ...             trainer.stop()
    """

    def on_step(self, trainer: Running, step: int, metrics: Mapping[str, float]) -> None:
        """A step was completed. ``step``: its number, from 1. ``metrics``: its line of ``metrics.jsonl``."""

    def on_evaluate(self, trainer: Running, step: int, table: ScoreTable) -> None:
        """The held-out tasks were evaluated."""

    def on_save(self, trainer: Running, step: int, folder: Path) -> None:
        """A checkpoint was written to ``folder``."""


class ProgressBar(Callback):
    """A tqdm bar with the mean reward, as a widget in notebooks. Only the main process shows it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_step(self, trainer: Running, step: int, metrics: Mapping[str, float]) -> None:
        from tqdm.auto import tqdm

        if self._bar is None:
            self._bar = tqdm(total=trainer.state.steps, initial=step - 1, desc=trainer.recipe.name, disable=not trainer.is_main)
        shown = {"reward": metrics.get("reward/mean"), "loss": metrics.get("policy/loss")}
        self._bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items() if value is not None}, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Close the bar at its current position."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_EVALUATION = "eval/"


def step_entry(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a step with its metrics."""
    return {"step": step, **metrics}


def evaluation_entry(step: int, means: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of an evaluation. ``means``: the row "all" of its table."""
    return {"step": step, **{f"{_EVALUATION}{column}": value for column, value in means.items() if column != "n"}}


def without_evaluation(history: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The history without the evaluation after ``step``, which a resumed run may make again."""
    return [entry for entry in history if entry["step"] != step or any(not _of_evaluation(key) for key in entry)]


def stored_history(folder: RunFolder, done: int) -> list[dict[str, Any]]:
    """The entries up to step ``done`` from the records of the run, in the order of steps; an evaluation comes after its step.

    Raises ValueError if a file was damaged by another program.
    """
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in folder.read_metrics():
        found[line["step"], False] = step_entry(line["step"], {key: line[key] for key in line if key not in ("step", "phase")})
    for line in folder.read_evals():
        if line["split"] == "heldout":
            found[line["step"], True] = evaluation_entry(line["step"], line["table"]["all"])
    kept = [found[key] for key in sorted(found) if key[0] <= done]
    return [{key: math.nan if value is None else value for key, value in entry.items()} for entry in kept]


def _of_evaluation(key: str) -> bool:
    return key == "step" or key.startswith(_EVALUATION)
