"""What policies of both kinds share in a recipe's rollout, and what a run gives the section that builds a policy.

Recipes import this file, so it imports no torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Section

if TYPE_CHECKING:
    from retouch.policies.engines.base import DenoisingEngine, Engine
    from retouch.policies.value_heads import LatentValues, TokenValues
    from retouch.policies.weights import WeightCopies


TRUNCATE_AT = 2.0


FirstGradientStep: TypeAlias = Callable[..., int]
"""``retouch.objectives.base.Objective.first_gradient_step``, called with (num_steps, seed=..., step=...)."""


class Refill(Section):
    """Groups whose rewards are all equal teach nothing. They are replaced with samples of further tasks, until all groups of the
    step carry a signal or ``rounds`` is reached (dynamic sampling of DAPO, arXiv 2503.14476)."""

    rounds: Count
    """Most times that the groups of a step are replaced. Each round samples and scores as many groups as are without a signal."""


class SharedRollout(Section):
    """The keys of a rollout that all policies have."""

    staleness: Annotated[int, Field(ge=0, le=16)] = Field(default=0, exclude_if=operator.not_)
    """Steps by which rollouts run ahead of learning: the samples of a step are made, and their scoring begins, under the weights
    of up to this many steps before, so slow rewards answer while the policy learns. 0 samples every step with the current weights.
    Above 0, as many copies of the trained weights are kept in CPU memory and in checkpoints, and each step computes the
    log-probabilities of its samples once more."""
    truncate_at: Annotated[float, Field(ge=1.0)] = Field(default=TRUNCATE_AT, exclude_if=partial(operator.eq, TRUNCATE_AT))
    """With ``staleness``: the loss of each action is weighted by its probability under the weights at the start of the step over
    that under the weights that sampled it, at most by this (truncated importance sampling). For transitions it is the ratio of the
    objective, of log-probabilities reduced as ``reduction`` says."""
    refill: Refill | None = Field(default=None, exclude_if=operator.not_)
    """Replace groups whose rewards are all equal; null keeps them, and they add nothing to the gradient."""


@dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """What a policy takes besides its model and its rollout.

    ``copies``: weights besides the current ones. ``microbatch``: rows of a forward with gradient. ``eval_steps``: denoising steps
    of an image without exploration; None: as in the rollout. ``acting``: the weights that act. ``keep_means``: the rollout
    stores the mean of each transition. ``engine``: what samples the completions or the chains of rollouts; None is the policy.
    ``any_rank``: whether a flag is true on at least one rank. ``in_step``: all ranks must call the model equally often. ``head``: a
    value head for this kind of policy. ``first_gradient_step``: the step of a denoising chain from which the loss continues it with
    gradient.
    """

    copies: WeightCopies
    microbatch: int
    eval_steps: int | None = None
    acting: Literal["current", "old"] = "current"
    keep_means: bool = False
    engine: Engine | DenoisingEngine | None = None
    any_rank: Callable[[bool], bool] = bool
    in_step: bool = False
    head: LatentValues | TokenValues | None = None
    first_gradient_step: FirstGradientStep | None = None
