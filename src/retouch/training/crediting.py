"""From what a row is worth to advantages of its actions: the same for all of them, or by what a value head expected."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.gae import discounted_returns, explained_variance, gae, whiten
from retouch.distributed.ranks import Ranks
from retouch.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """``advantages`` of this rank's rows; ``returns``: what a value head learns, where there is one; metrics over all ranks."""

    advantages: Float[Tensor, "b t"]
    returns: Float[Tensor, "b t"] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


Crediting = Callable[[Float[Tensor, " b"], Trajectory, Ranks], Credit]


def each_action(worth: Float[Tensor, " b"], trajectory: Trajectory, ranks: Ranks) -> Credit:
    """A row's worth is the advantage of each of its actions."""
    return Credit(worth[:, None].expand(trajectory.mask.shape))


@dataclass(frozen=True, kw_only=True)
class ByValue:
    """Generalized advantage estimation over the values that the trajectory has; a row's worth is its reward, NaN where missing.

    ``whiten``: over all actions of all ranks. ``clip``: largest absolute advantage. The metric ``value/explained_variance`` is of
    the discounted rewards themselves and not of the returns, which hold values where ``lam`` is below 1.
    """

    gamma: float
    lam: float
    whiten: bool
    clip: float | None

    def __call__(self, worth: Float[Tensor, " b"], trajectory: Trajectory, ranks: Ranks) -> Credit:
        assert trajectory.values is not None, "the policy has a value head"
        values, mask = trajectory.values.cpu(), trajectory.mask.cpu()
        advantages = gae(worth, values, mask, gamma=self.gamma, lam=self.lam)
        returns = advantages + values
        counted = mask & ~worth.isnan()[:, None]
        earned = discounted_returns(worth.nan_to_num(0.0), mask, gamma=self.gamma)
        columns = torch.stack([advantages, values, earned, counted.float()], dim=1)
        every, expected, came, counting = ranks.gather(columns).unbind(dim=1)
        metrics = {"value/explained_variance": explained_variance(came, expected, counting > 0)}
        if self.whiten:
            first = ranks.rank * len(worth)
            advantages = whiten(every, counting > 0)[first : first + len(worth)]
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)
        return Credit(advantages, returns, metrics)
