"""Observations: the scores of images of the watched held-out tasks after a step, and the comparison of two observations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.intervals import MeanEstimate, estimate_mean
from retouch.records import files
from retouch.types import Scores


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The measurements after ``step`` steps.

    ``scores``: by name, one score per task (n,), NaN if it could not be measured. ``canaries``: by reward column, the scores (k,)
    of the canary images. ``judge``: the fingerprint of the held-out judge, or "". ``sources``: the source of each task; empty if no
    tasks share a source.
    """

    step: int
    tasks: tuple[str, ...]
    scores: Scores
    canaries: Scores = field(default_factory=dict)
    judge: str = ""
    sources: tuple[str, ...] = ()

    def mean(self, name: str) -> float:
        """Return the mean over the tasks with a score."""
        return self.scores[name].double().nanmean().item()

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "judge": self.judge,
            "tasks": list(self.tasks),
            **({"sources": list(self.sources)} if self.sources else {}),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
            "canaries": {name: column.tolist() for name, column in self.canaries.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Observation":
        """Read the result of ``to_json``."""
        scores, canaries = ({name: _column(record[part][name]) for name in record[part]} for part in ("scores", "canaries"))
        return cls(record["step"], tuple(record["tasks"]), scores, canaries, record["judge"], tuple(record.get("sources", ())))


def paired_change(before: Observation, after: Observation, name: str) -> MeanEstimate:
    """Estimate the mean change of the scores ``name`` over the tasks that both observations scored."""
    change = (after.scores[name] - before.scores[name]).double().tolist()
    return estimate_mean(change, after.sources or [""] * len(change))


class ObservationStore:
    """Stores the observations of a run, one file each, in ``folder``. One rank writes them, all ranks read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, observation: Observation) -> None:
        """Store the observation. It replaces an observation of the same step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(self.folder / f"step-{observation.step:06d}.json", observation.to_json())

    def until(self, step: int) -> list[Observation]:
        """Return the observations up to and including ``step``, in order."""
        found = [Observation.from_json(files.read_record(path)) for path in self.folder.glob("step-*.json")]
        return sorted((each for each in found if each.step <= step), key=lambda each: each.step)


def _column(values: Sequence[float | None]) -> Float[Tensor, " n"]:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
