"""PPO as it was published: a policy gradient, and beside it a value head that learns what to expect."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from retouch.core.gae import clipped_value_loss
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.protocols import Policy
from retouch.types import Loss, Minibatch


@dataclass(frozen=True, kw_only=True)
class ActorCritic:
    """The ``actor``'s loss plus that of the values, each from the same evaluation (Schulman et al. 2017, arXiv 1707.06347).

    ``clip``: how far a value counts as moved from what it was when the policy acted; None: as far as it is. What of the value loss
    reaches the policy's own weights is for the policy to say, whose head it is.
    """

    actor: PolicyGradient
    clip: float | None = None

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        assert trajectory.values is not None, "the policy has a value head"
        assert minibatch.returns is not None, "whoever collected it knew of the head"
        needs = replace(self.actor.needs, values=True)
        for part in policy.microbatches(trajectory):
            evaluation = policy.evaluate(trajectory, part, needs)
            assert evaluation.values is not None
            loss = clipped_value_loss(
                evaluation.values,
                trajectory.values[part.rows, part.actions],
                minibatch.returns[part.rows, part.actions],
                clip=self.clip,
                mask=trajectory.mask[part.rows, part.actions],
            )
            value = (minibatch.weights[part.rows, part.actions] * loss).sum()
            acted = self.actor.loss(evaluation, minibatch, part)
            yield Loss(acted.value + value, {**acted.sums, "value/loss": value.detach()}, acted.maxima)

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: the acting policy is the policy."""
