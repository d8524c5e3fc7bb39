"""Looks at held-out pictures: what was measured of each, kept in a file a look, and how two looks compare, task by task."""

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
class Look:
    """What was seen after ``step`` steps. ``scores``: name to (n,), a score for each task, NaN where it could not be told.

    ``canaries``: column to the reward's scores (k,) of the canaries. ``judge``: the held-out judge's fingerprint, or nothing.
    """

    step: int
    tasks: tuple[str, ...]
    scores: Scores
    canaries: Scores = field(default_factory=dict)
    judge: str = ""

    def mean(self, name: str) -> float:
        """The mean over tasks whose score is known."""
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
    def from_json(cls, kept: Mapping[str, Any]) -> "Look":
        """The inverse of ``to_json``."""
        scores, canaries = ({name: _column(kept[part][name]) for name in kept[part]} for part in ("scores", "canaries"))
        return cls(kept["step"], tuple(kept["tasks"]), scores, canaries, kept["judge"])


@dataclass(frozen=True, slots=True)
class Change:
    """Of the mean over tasks that both looks know: how much, and how many standard errors of the paired difference."""

    mean: float
    sigmas: float


def change(before: Float[Tensor, " n"], after: Float[Tensor, " n"]) -> Change:
    """From one look's scores to another's of the same tasks. NaN where no task is known to both; 0 sigmas for a single one."""
    apart = (after - before).double()
    apart = apart[~apart.isnan()]
    mean = apart.mean().item()
    if len(apart) < 2:
        return Change(mean, 0.0 if len(apart) else math.nan)
    error = apart.std().item() / math.sqrt(len(apart))
    return Change(mean, mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0)


class Looks:
    """The looks of a run, a file each in ``folder``: written by one rank, read by all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, look: Look) -> None:
        """Keep the look; one of the same step is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(self.folder / f"step-{look.step:06d}.json", look.to_json())

    def until(self, step: int) -> list[Look]:
        """The looks up to that step, in order."""
        kept = [Look.from_json(files.read_json(path)) for path in self.folder.glob("step-*.json")]
        return sorted((look for look in kept if look.step <= step), key=lambda look: look.step)


def _column(values: Sequence[float | None]) -> Float[Tensor, " n"]:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
