"""The log history of a ``Trainer``: an entry for each step and each evaluation, also for those of earlier starts of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch.records.folder import RunFolder

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
