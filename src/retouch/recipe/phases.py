"""Phases of a run: each says what differs from the recipe's own keys; resolved, it says everything."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retouch.config.section import Cadence, Count, Positive, Section
from retouch.data.sampler import steps_for_passes
from retouch.recipe.data import Data
from retouch.recipe.learning import Objective, Sft, Supervised
from retouch.recipe.rollout import Rollout

if TYPE_CHECKING:
    from retouch.recipe.recipe import Recipe


class Phase(Section):
    """A stage of a run; null takes what the recipe says at its top."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the phase, in metrics and messages."""
    steps: Cadence | None = None
    """Training steps of the phase; give this or ``passes``. 0 passes it over."""
    passes: Positive | None = None
    """Length of the phase in passes over its data."""
    objective: Objective | None = None
    """How advantages become a loss."""
    learning_rate: Positive | None = None
    """Learning rate of the optimizer, before its schedule, which begins anew with each phase."""
    tasks_per_step: Count | None = None
    """Tasks that the policy acts on in a step, over all ranks."""
    group_size: Count | None = None
    """Samples of each task."""
    data: Data | None = None
    """Where the tasks come from."""
    rollout: Rollout | None = None
    """How the policy samples while it learns."""
    keep_optimizer: bool = False
    """Go on with the optimizer's state of the phase before."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPhase:
    """A phase with nothing left open."""

    name: str
    steps: int | None
    passes: float | None
    objective: Objective
    learning_rate: float
    tasks_per_step: int
    group_size: int
    data: Data
    rollout: Rollout
    keep_optimizer: bool

    @classmethod
    def of(cls, recipe: "Recipe", phase: Phase) -> "ResolvedPhase":
        """What the phase says, and for the rest what the recipe says."""
        return cls(
            name=phase.name,
            steps=phase.steps,
            passes=phase.passes,
            objective=recipe.objective if phase.objective is None else phase.objective,
            learning_rate=recipe.learning_rate if phase.learning_rate is None else phase.learning_rate,
            tasks_per_step=recipe.tasks_per_step if phase.tasks_per_step is None else phase.tasks_per_step,
            group_size=recipe.group_size if phase.group_size is None else phase.group_size,
            data=recipe.data if phase.data is None else phase.data,
            rollout=recipe.rollout if phase.rollout is None else phase.rollout,
            keep_optimizer=phase.keep_optimizer,
        )

    @property
    def rows(self) -> int:
        """Samples of a step, over all ranks."""
        return self.tasks_per_step * self.group_size

    @property
    def imitates(self) -> bool:
        """Whether it learns from its tasks' targets, which takes no rollout and no judge."""
        return isinstance(self.objective, Supervised | Sft)

    def total_steps(self, tasks: int) -> int:
        """Training steps of the phase, where its data hold so many tasks."""
        if self.steps is not None:
            return self.steps
        assert self.passes is not None, "a phase has steps or passes"
        return steps_for_passes(self.passes, size=tasks, count=self.tasks_per_step)
