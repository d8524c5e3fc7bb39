"""How a denoising policy samples while it learns, as a recipe says it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.kinds import Kinds
from retouch.config.section import Count, Positive, Section
from retouch.models.base import ImageModel
from retouch.models.train import TrainedPart
from retouch.policies.context import StaleRollout
from retouch.policies.denoising.transitions import TRANSITIONS, Transition
from retouch.policies.denoising.windows import WINDOWS, AllSteps, Window
from retouch.policies.engines.base import DenoisingEngine, Diagnosis, EngineContext
from retouch.protocols import DenoisingModel

CHAIN_ENGINES = Kinds("chain_engine", {"sglang": "retouch.policies.engines.sglang.section:SglangEngine"})


class ChainEngineSection(Section):
    """What every engine of denoising chains has. The policy computes the log-probabilities that are trained on."""

    max_mismatch: Positive = 0.1
    """The run stops if the means of the engine's steps differ from the policy's by more than this share of the step's standard
    deviation: the root of the mean square over the elements of a rollout. Both log-probabilities of a step give it."""
    truncate_at: Annotated[float, Field(ge=1.0)] | None = 2.0
    """Each action's loss is weighted by the policy's probability over the engine's, at most by this; null does not weight. The
    ratio is that of the objective, of log-probabilities reduced as ``reduction`` says."""

    def build(self, model: DenoisingModel, context: EngineContext) -> DenoisingEngine:
        """The engine for ``model``. ValueError if it cannot sample for this model."""
        raise NotImplementedError

    def problems(self, rollout: DenoisingRollout, key: str, *, model: ImageModel, train: TrainedPart) -> Iterator[str]:
        """What of the policy this engine cannot do, as "key: mistake; what to do". ``key``: of the rollout."""
        return iter(())

    def diagnose(self, *, base_model: str | None, full_weights: bool) -> Iterator[Diagnosis]:
        """Whether the engine is ready to be used; for ``retouch doctor``. ``base_model``: the policy's path, if it is known."""
        return iter(())


class DenoisingRollout(StaleRollout):
    """How a denoising policy samples during training."""

    num_steps: Annotated[int, Field(ge=1)]
    """Denoising steps of an image."""
    transition: Annotated[Transition, TRANSITIONS]
    """What happens in a step that trains; all other steps are deterministic."""
    reduction: Literal["mean", "sum"] = "mean"
    """How a transition's log-probability is reduced over the elements of a latent; the clip range depends on it."""
    window: Annotated[Window, WINDOWS] = AllSteps()
    """Which steps of the chain train."""
    guidance_scale: Annotated[float, Field(ge=1.0)] = 1.0
    """Classifier-free guidance in sampling and training alike; 1 is none, larger values double the forward passes."""
    shared_noise: bool = False
    """All samples of a group start from the same noise."""
    chunk: Count = 128
    """Rows per forward pass when sampling."""
    equal_shapes: bool = Field(default=True, exclude_if=lambda equal: equal)
    """For a model in 16 bits: compute the steps that train in forward passes of equally many rows in rollout and update (those of
    ``microbatch``, at most ``chunk``), because a velocity in 16 bits depends on the shape of its forward pass. False is faster if
    ``microbatch`` is small, and its ratios are not 1 before the first update."""
    engine: Annotated[ChainEngineSection, CHAIN_ENGINES] | None = Field(default=None, exclude_if=operator.not_)
    """What samples the chains; null is the policy itself."""

    writes_tokens: ClassVar[bool] = False

    @property
    def actions(self) -> int | None:
        """Actions of a row."""
        return self.num_steps - 1 if isinstance(self.window, AllSteps) else self.window.length

    @property
    def longest(self) -> int:
        """Most actions that a row can have."""
        return len(self.window.actions(num_steps=self.num_steps, seed=0, step=0))

    def problems(self, key: str) -> Iterator[str]:
        """A line for everything in it that cannot work, as "key: mistake; what to do"."""
        if not self.transition.stochastic:
            if self.shared_noise:
                yield f"{key}.shared_noise: with ode all samples of a group would be equal; remove it, or use cps"
        elif self.num_steps < 2:
            last = "leaves no step to train besides the last, which never trains"
            yield f"{key}.num_steps: {self.num_steps} {last}; use 2 or more"
        else:
            yield from self.window.problems(num_steps=self.num_steps, key=f"{key}.window")
