"""The rollout keys that both kinds of policies share, and the arguments with which a run builds a policy.

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
    from retouch.policies.engine import DenoisingEngine, Engine
    from retouch.policies.value_heads import LatentValues, TokenValues
    from retouch.policies.weights import WeightCopies


TRUNCATE_AT = 2.0


FirstGradientStep: TypeAlias = Callable[..., int]
"""``retouch.objectives.base.Objective.first_gradient_step``, called with (num_steps, seed=..., step=...)."""


class Refill(Section):
    """Replace groups whose rewards are all equal, because they have no gradient. They are replaced with samples of further tasks,
    until all groups of the step have different rewards or ``rounds`` is reached (dynamic sampling of DAPO, arXiv 2503.14476)."""

    rounds: Count
    """Largest number of rounds of replacement in a step. Each round samples and scores as many groups as have equal rewards."""


class SharedRollout(Section):
    """The keys of a rollout that all policies share."""

    staleness: Annotated[int, Field(ge=0, le=16)] = Field(default=0, exclude_if=operator.not_)
    """Number of steps by which rollouts run ahead of learning. The samples of a step are generated, and their scoring begins, with
    weights that are up to this many steps old, so that slow rewards are computed while the policy learns. 0 samples every step with
    the current weights. Above 0, this number of copies of the trained weights is kept in CPU memory (with ``sharding: fsdp2``, on
    the device of the weights) and in checkpoints, and each step computes the log-probabilities of its samples again."""
    truncate_at: Annotated[float, Field(ge=1.0)] = Field(default=TRUNCATE_AT, exclude_if=partial(operator.eq, TRUNCATE_AT))
    """With ``staleness``: the largest importance weight of an action in the loss (truncated importance sampling). The weight is the
    probability of the action under the weights at the start of the step, divided by its probability under the weights that sampled
    it. For transitions it is computed like the objective's ratio, from log-probabilities reduced with ``reduction``."""
    refill: Refill | None = Field(default=None, exclude_if=operator.not_)
    """Replace groups whose rewards are all equal; null keeps them, though they do not contribute to the gradient."""


@dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """The arguments of a policy besides its model and its rollout section.

    ``copies``: the copies of the weights. ``microbatch``: rows of a forward pass with gradient. ``eval_steps``: denoising steps of
    an image in evaluation, without exploration; None means as in the rollout. ``acting``: the weights that sample rollouts.
    ``keep_means``: the rollout stores the mean of each transition. ``engine``: samples the completions or the chains of rollouts;
    None means that the policy's own model samples them. ``any_rank``: tells whether a flag is true on at least one rank.
    ``in_step``: all ranks must call the model equally often. ``head``: a value head for this kind of policy.
    ``first_gradient_step``: gives the first step of a denoising chain that the loss computes with gradient.
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
