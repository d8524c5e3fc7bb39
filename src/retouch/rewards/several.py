"""Rewards that contain rewards: ``several``, whose columns are combined into one number, and ``calibrated``, which maps a judge's
score to the probability that people prefer the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_serializer

from retouch.config.section import Kinds
from retouch.protocols import DifferentiableReward, Reward
from retouch.rewards.base import (
    WIN_PROBABILITY,
    JudgeClients,
    PathText,
    RewardSection,
    RunFacts,
    TaskFacts,
    unchanged,
    whole_group_problems,
)
from retouch.rewards.combination import gradient_weights, weighted_scores
from retouch.rewards.parts import PARTS, SINGLE
from retouch.types import Column, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
_COMMON = ("combine", "max_missing")
PARTS_OF_SEVERAL = Kinds("reward", {**SINGLE, "calibrated": "retouch.rewards.several:CalibratedReward"}, with_wings=True)


class ContainingReward(RewardSection):
    """Base class of rewards that contain rewards (``parts``): those say what the tasks lack, and which keys are changeable."""

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        for inner, _, section in self.parts(path):
            yield from section.task_problems(inner, tasks)

    def changeable_paths(self, path: str) -> Iterator[str]:
        for inner, _, section in self.parts(path):
            yield from section.changeable_paths(inner)


class SeveralRewards(ContainingReward):
    """Several rewards, which score in parallel; the column ``alignment`` of the reward ``judge`` is named ``judge/alignment``.

    ``draft`` and ``refl`` differentiate the weighted sum of the rewards, if all of them are differentiable.
    """

    kind: Literal["several"] = "several"
    rewards: Annotated[dict[Name, Annotated[RewardSection, PARTS_OF_SEVERAL]], Field(min_length=1)]
    """The rewards, under names of your choice."""

    @field_serializer("rewards")
    def _parts(self, rewards: dict[str, RewardSection]) -> dict[str, Any]:
        """The rewards as JSON, without the keys ``combine`` and ``max_missing``, which belong to all rewards together."""
        documents = {name: PARTS_OF_SEVERAL.document(part) for name, part in rewards.items()}
        return {name: {key: value for key, value in each.items() if key not in _COMMON} for name, each in documents.items()}

    def known_columns(self) -> Mapping[str, Column] | None:
        columns: dict[str, Column] = {}
        for name, part in self.rewards.items():
            own = part.known_columns()
            if own is None:
                return None
            columns |= {f"{name}/{column}": range_ for column, range_ in own.items()}
        return columns

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, RewardSection]]:
        """Yield each reward, with its name as the prefix of its columns."""
        for name, part in self.rewards.items():
            for inner, _, section in part.parts(f"{path}.rewards.{name}"):
                yield inner, f"{name}/", section

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield the problems of the rewards, and keys of a single reward that belong to all rewards together."""
        for name, part in self.rewards.items():
            if part.model_fields_set & set(_COMMON):
                yield (
                    f"{path}.rewards.{name}: combine and max_missing belong to all rewards together; move them next to `rewards`"
                )
            yield from part.problems(f"{path}.rewards.{name}", f"{name}/", run)

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Build a ``CompositeReward``; ``keep`` is applied to each of its rewards."""
        from retouch.rewards.judging import CompositeReward

        clients = JudgeClients(device) if clients is None else clients
        parts = {name: part.build(device=device, clients=clients, keep=keep) for name, part in self.rewards.items()}
        return CompositeReward(parts, combine=self.combine)

    def require_gradient(self) -> None:
        """Raise ValueError if a reward has no gradient in the image, or if ``combine`` is not a weighted sum of differentiable
        columns."""
        for name, part in self.rewards.items():
            if not isinstance(part, DifferentiableReward):
                raise ValueError(f"rewards.{name}: {part.name} has no gradient in the image; use it only in `reward`")
            if part.model_fields_set & set(_COMMON):
                raise ValueError(f"rewards.{name}: combine and max_missing belong to all rewards together; move them up")
        gradient_weights(self.rewards, self.combine)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The weighted sum of the rewards' scores of ``images``, with gradient (``retouch.protocols.DifferentiableReward``)."""
        return weighted_scores(self.rewards, self.combine, images, tasks)


class CalibratedReward(ContainingReward):
    """A wrapper that maps the score of another reward to the probability that people prefer the image. ``retouch votes RUN
    calibrate COLUMN --to FILE`` fits the map on votes.

    Columns: ``win_probability``, 0 to 1; ``win_probability_sd``, a diagnostic, the standard deviation of the map at this score; and
    all columns of the wrapped reward. A missing score stays missing.
    """

    kind: Literal["calibrated"] = "calibrated"
    of: Annotated[RewardSection, PARTS]
    """The wrapped reward, without the keys ``combine`` and ``max_missing``."""
    column: str
    """The column of the wrapped reward that is mapped."""
    map: PathText
    """The file with the map, written by ``retouch votes RUN calibrate COLUMN --to FILE``."""

    columns: ClassVar[Mapping[str, Column]] = WIN_PROBABILITY

    @field_serializer("of")
    def _part(self, of: RewardSection) -> dict[str, Any]:
        """The wrapped reward as JSON, without the keys ``combine`` and ``max_missing``, which belong to the calibrated reward."""
        return {key: value for key, value in PARTS.document(of).items() if key not in _COMMON}

    def known_columns(self) -> Mapping[str, Column] | None:
        own = self.of.known_columns()
        return None if own is None else {**WIN_PROBABILITY, **own}

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, RewardSection]]:
        yield from self.of.parts(f"{path}.of")

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield the problems of the wrapped reward, an unknown ``column``, and keys of ``of`` that belong to the calibrated
        reward."""
        if self.of.model_fields_set & set(_COMMON):
            yield f"{path}.of: combine and max_missing belong to the calibrated reward; move them up, next to `of`"
        own = self.of.known_columns()
        if own is not None and self.column not in own:
            yield f"{path}.column: the reward has no column {self.column!r}; its columns are {', '.join(own)}"
        found = [line for inner, _, section in self.parts(path) for line in section.problems(inner, prefix, run)]
        if self.of.compares_groups:
            found += whole_group_problems(run, column=f"{prefix}win_probability", reward=self.of.name)
        yield from dict.fromkeys(found)

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Build a ``CalibratedScores``; ``keep`` is applied to the wrapped reward only. Raises ValueError if the map is missing or
        was fitted for another column."""
        from retouch.rewards.judging import CalibratedScores, Calibration

        calibration = Calibration.load(Path(self.map))
        if calibration.column != self.column:
            raise ValueError(
                f"{self.map} maps {calibration.column!r}, but reward.column is {self.column!r}; use the map of this column"
            )
        return CalibratedScores(self.of.build(device=device, clients=clients, keep=keep), self.column, calibration)
