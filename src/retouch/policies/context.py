"""What a run gives the section of a policy that builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from retouch.policies.engines.base import Engine
    from retouch.policies.value_heads import LatentValues, TokenValues
    from retouch.policies.weights import WeightCopies


@dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """What a policy takes besides its model and its rollout.

    ``copies``: weights besides the current ones. ``microbatch``: rows of a forward with gradient. ``eval_steps``: denoising steps
    of an image without exploration; None: as in the rollout. ``acting``: the weights that act. ``keep_means``: the rollout
    stores the mean of each transition. ``engine``: what generates the completions of a policy of tokens; None is its own cache.
    ``any_rank``: whether a flag is true on at least one rank. ``in_step``: all ranks must call the model equally often. ``head``: a
    value head for this kind of policy.
    """

    copies: WeightCopies
    microbatch: int
    eval_steps: int | None = None
    acting: Literal["current", "old"] = "current"
    keep_means: bool = False
    engine: Engine | None = None
    any_rank: Callable[[bool], bool] = bool
    in_step: bool = False
    head: LatentValues | TokenValues | None = None
