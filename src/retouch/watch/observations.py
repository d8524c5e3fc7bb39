"""Observations: the scores of images of the watched held-out tasks after a step, and the comparison of two observations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.records import files
from retouch.types import Scores


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The measurements after ``step`` steps.

    ``scores``: by name, one score per task (n,), NaN if it could not be measured. ``canaries``: by reward column, the scores (k,)
    of the canary images. ``judge``: the fingerprint of the held-out judge, or "".
    """

    step: int
    tasks: tuple[str, ...]
    scores: Scores
    canaries: Scores = field(default_factory=dict)
    judge: str = ""

    def mean(self, name: str) -> float:
        """Return the mean over the tasks with a score."""
        return self.scores[name].double().nanmean().item()

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "judge": self.judge,
            "tasks": list(self.tasks),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
            "canaries": {name: column.tolist() for name, column in self.canaries.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Observation":
        """Read the result of ``to_json``."""
        scores, canaries = ({name: _column(record[part][name]) for name in record[part]} for part in ("scores", "canaries"))
        return cls(record["step"], tuple(record["tasks"]), scores, canaries, record["judge"])


@dataclass(frozen=True, slots=True)
class PairedChange:
    """The mean difference over the tasks that both observations scored. ``sigmas``: ``mean`` in standard errors of the paired
    difference."""

    mean: float
    sigmas: float


def paired_change(before: Float[Tensor, " n"], after: Float[Tensor, " n"]) -> PairedChange:
    """Return the change of the scores of the same n tasks. NaN if no task has both scores; ``sigmas`` is 0 for a single task."""
    difference = (after - before).double()
    difference = difference[~difference.isnan()]
    mean = difference.mean().item()
    if len(difference) < 2:
        return PairedChange(mean, 0.0 if len(difference) else math.nan)
    error = difference.std().item() / math.sqrt(len(difference))
    return PairedChange(mean, mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0)


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
        found = [Observation.from_json(files.read_json(path)) for path in self.folder.glob("step-*.json")]
        return sorted((each for each in found if each.step <= step), key=lambda each: each.step)


def _column(values: Sequence[float | None]) -> Float[Tensor, " n"]:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
