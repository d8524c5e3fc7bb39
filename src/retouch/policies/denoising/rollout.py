"""The recipe section of a denoising rollout: how a denoising policy samples during training."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.kinds import Kinds
from retouch.config.section import Count
from retouch.models.base import ImageModel
from retouch.models.train import TrainSection
from retouch.policies.context import SharedRollout
from retouch.policies.denoising.transitions import TRANSITIONS, Transition
from retouch.policies.denoising.windows import WINDOWS, AllSteps, Window
from retouch.policies.engine import ChainEngineSection

CHAIN_ENGINES = Kinds("chain_engine", {}, with_wings=True)


class DenoisingRollout(SharedRollout):
    """How a denoising policy samples during training."""

    num_steps: Annotated[int, Field(ge=1)]
    """Number of denoising steps of an image."""
    transition: Annotated[Transition, TRANSITIONS]
    """The transition of the steps that train; all other steps are deterministic."""
    reduction: Literal["mean", "sum"] = "mean"
    """How a transition's log-probability is reduced over the elements of a latent; the clip range depends on it."""
    window: Annotated[Window, WINDOWS] = AllSteps()
    """Which steps of the chain train."""
    guidance_scale: Annotated[float, Field(ge=1.0)] = 1.0
    """Scale of classifier-free guidance in sampling and training; 1 means none, larger values double the forward passes."""
    shared_noise: bool = False
    """Whether all samples of a group start from the same noise."""
    chunk: Count = 128
    """Rows per forward pass when sampling."""
    equal_shapes: bool = Field(default=True, exclude_if=lambda equal: equal)
    """For a model in 16 bits: rollout and update compute the steps that train in forward passes with the same number of rows (that
    of a microbatch, at most ``chunk``), because a velocity in 16 bits depends on the shape of its forward pass. False is faster if
    ``microbatch`` is small, but then the ratios are not 1 before the first update."""
    engine: Annotated[ChainEngineSection, CHAIN_ENGINES] | None = Field(default=None, exclude_if=operator.not_)
    """The engine that samples the chains; null means the policy's own model."""

    is_autoregressive: ClassVar[bool] = False

    @property
    def actions(self) -> int | None:
        """Number of actions of a row; None if it is not known."""
        return self.num_steps - 1 if isinstance(self.window, AllSteps) else self.window.length

    @property
    def longest(self) -> int:
        """The largest number of actions that a row can have."""
        return len(self.window.actions(num_steps=self.num_steps, seed=0, step=0))

    def problems(self, key: str) -> Iterator[str]:
        """Yield a line for each setting that cannot work, as "key: mistake; what to do"."""
        if not self.transition.stochastic:
            if self.shared_noise:
                yield f"{key}.shared_noise: with ode all samples of a group would be equal; remove it, or use cps"
            if self.window != AllSteps():
                yield f"{key}.window: with ode no step is stochastic, so a window has no effect; remove it, or use cps"
        elif self.num_steps < 2:
            last = "leaves no step to train besides the last, which never trains"
            yield f"{key}.num_steps: {self.num_steps} {last}; use 2 or more"
        else:
            yield from self.window.problems(num_steps=self.num_steps, key=f"{key}.window")

    def engine_problems(self, key: str, *, model: ImageModel, train: TrainSection) -> Iterator[str]:
        """Yield a line for each setting that the engine does not support, in the form of ``problems``."""
        if self.engine is not None:
            yield from self.engine.problems(
                key,
                transition=getattr(self.transition, "kind", "import"),
                noise_level=self.transition.exploration,
                shared_noise=self.shared_noise,
                branches=self.window.branches,
                model=model,
                train=train,
            )
