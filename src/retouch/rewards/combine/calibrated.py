"""The reward of kind ``calibrated``: a judge's score as the probability that people prefer the image."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import field_serializer

from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, close, unchanged
from retouch.rewards.facts import PathText, RunFacts, TaskFacts
from retouch.rewards.parts import PARTS
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch

    from retouch.rewards.vlm.base import JudgeClients
    from retouch.rewards.votes.calibration import Calibration

_COMMON = ("combine", "max_missing")
_ADDED: Mapping[str, Column] = {
    "win_probability": Column(0.0, 1.0),
    "win_probability_sd": Column(0.0, 1.0, diagnostic=True),
}


class CalibratedReward(RewardSection):
    """Another reward, whose score is mapped to the probability that people prefer the image. ``retouch votes RUN calibrate COLUMN
    --to FILE`` fits the map on votes.

    Columns: ``win_probability``, 0 to 1; ``win_probability_sd``, a diagnostic, the standard deviation of the map at this score; and
    all columns of the other reward. A missing score stays missing.
    """

    kind: Literal["calibrated"] = "calibrated"
    of: Annotated[RewardSection, PARTS]
    """The reward whose score is mapped, without ``combine`` and ``max_missing``."""
    column: str
    """Its column that is mapped."""
    map: PathText
    """The file with the map, which ``retouch votes`` wrote."""

    columns: ClassVar[Mapping[str, Column]] = _ADDED

    @field_serializer("of")
    def _part(self, of: RewardSection) -> dict[str, Any]:
        """Without the keys that belong to this reward."""
        return {key: value for key, value in PARTS.document(of).items() if key not in _COMMON}

    def known_columns(self) -> Mapping[str, Column] | None:
        """The two added columns and those of the other reward; None if that does not know its own."""
        own = self.of.known_columns()
        return None if own is None else {**_ADDED, **own}

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, RewardSection]]:
        """The reward whose score is mapped."""
        yield from self.of.parts(f"{path}.of")

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Those of the other reward, a column that it does not give, and keys of it that belong to this one."""
        if self.of.model_fields_set & set(_COMMON):
            yield f"{path}.of: combine and max_missing belong to the calibrated reward; move them up, next to `of`"
        own = self.of.known_columns()
        if own is not None and self.column not in own:
            yield f"{path}.column: the reward gives no {self.column!r}; it gives {', '.join(own)}"
        for inner, _, section in self.parts(path):
            yield from section.problems(inner, prefix, run)

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Those of the other reward."""
        for inner, _, section in self.parts(path):
            yield from section.task_problems(inner, tasks)

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Those of the other reward."""
        yield from self.of.changeable_paths(f"{path}.of")

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """A ``CalibratedScores``; the other reward is put behind the ledger by itself. ValueError: no map, or another column's."""
        from retouch.rewards.votes.calibration import Calibration

        calibration = Calibration.load(Path(self.map))
        if calibration.column != self.column:
            raise ValueError(
                f"{self.map} maps {calibration.column!r}, and reward.column is {self.column!r}; use the map of this column"
            )
        return CalibratedScores(self.of.build(device=device, clients=clients, keep=keep), self.column, calibration)


class CalibratedScores:
    """``reward`` with the two added columns."""

    kind: Literal["calibrated"] = "calibrated"

    def __init__(self, reward: Reward, column: str, calibration: Calibration) -> None:
        if column not in reward.columns:
            raise ValueError(f"reward.column: the reward gives no {column!r}; it gives {', '.join(reward.columns)}")
        self.reward, self.column, self.calibration = reward, column, calibration
        self.columns: Mapping[str, Column] = {**_ADDED, **reward.columns}
        self.reads_completions = bool(getattr(reward, "reads_completions", False))

    @property
    def fingerprint(self) -> str:
        """What the other reward scores by, and the map."""
        from retouch.rewards.identity import describe

        return json.dumps([describe(self.reward), self.column, self.calibration.to_json()], sort_keys=True)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """All columns, (b,), float32; both added ones are NaN where the score is missing."""
        import torch

        scores = self.reward(samples)
        mapped = [self.calibration.at(value) for value in scores[self.column].tolist()]
        added = torch.tensor(mapped, dtype=torch.float32).view(-1, 2).unbind(dim=1)
        return {**dict(zip(_ADDED, added, strict=True)), **scores}

    def close(self) -> None:
        """Close the other reward."""
        close(self.reward)
