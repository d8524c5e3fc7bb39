"""The rollout and the phases of a run. A phase overrides keys of the recipe; a resolved phase has all of these keys."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Field, Tag

from retouch.config.section import UNTAGGED, Count, Positive, Section, StepInterval
from retouch.data.base import DataSource
from retouch.data.kinds import DATA
from retouch.data.sampler import steps_for_passes
from retouch.objectives.base import Objective
from retouch.objectives.kinds import OBJECTIVES
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.denoising.rollout import DenoisingRollout


def _rollout_kind(value: Any) -> str:
    """The kind of a rollout. A rollout without a kind is the rollout of a denoising chain."""
    kind = value.get("kind", UNTAGGED) if isinstance(value, dict) else getattr(value, "kind", UNTAGGED)
    return kind if isinstance(kind, str) else UNTAGGED


Rollout: TypeAlias = Annotated[
    Annotated[DenoisingRollout, Tag(UNTAGGED)] | Annotated[TokenRollout, Tag("tokens")], Discriminator(_rollout_kind)
]
"""How a policy samples during training: a denoising chain, or tokens."""


class PhaseKeys(Section):
    """A phase of a run. A key that is null has the value of the recipe's top level."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the phase in metrics and messages."""
    steps: StepInterval | None = None
    """Training steps of the phase; give this or ``passes``. 0 skips the phase."""
    passes: Positive | None = None
    """Length of the phase in passes over its data."""
    objective: Annotated[Objective, OBJECTIVES] | None = None
    """How advantages become a loss."""
    learning_rate: Positive | None = None
    """Learning rate of the optimizer, before its schedule; the schedule restarts with each phase."""
    tasks_per_step: Count | None = None
    """Tasks per training step, over all ranks."""
    group_size: Count | None = None
    """Samples per task."""
    data: Annotated[DataSource, DATA] | None = None
    """The tasks."""
    rollout: Rollout | None = None
    """How the policy samples during training."""
    keep_optimizer: bool = False
    """Continue with the optimizer state of the previous phase."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPhase:
    """A phase with all its keys: its own, and those of the recipe that it does not override."""

    name: str
    steps: int | None
    passes: float | None
    objective: Objective
    learning_rate: float
    tasks_per_step: int
    group_size: int
    data: DataSource
    rollout: Rollout
    keep_optimizer: bool

    @property
    def rows(self) -> int:
        """Samples per step, over all ranks."""
        return self.tasks_per_step * self.group_size

    @property
    def imitates(self) -> bool:
        """Whether the phase learns from the targets of its tasks, without rollout and reward."""
        return self.objective.imitates

    def total_steps(self, tasks: int) -> int:
        """Training steps of the phase, for a data set of ``tasks`` tasks."""
        if self.steps is not None:
            return self.steps
        assert self.passes is not None, "a phase has steps or passes"
        return steps_for_passes(self.passes, size=tasks, count=self.tasks_per_step)
