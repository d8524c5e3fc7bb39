"""PPO with a value head: the loss of a policy gradient and the loss of the values, from one evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from retouch.protocols import Policy
from retouch.types import Evaluation, Loss, Minibatch, Needs, Slice


@runtime_checkable
class Actor(Protocol):
    """The policy gradient of an actor-critic."""

    @property
    def needs(self) -> Needs:
        """What the loss needs from an evaluation."""

    def loss(self, evaluation: Evaluation, minibatch: Minibatch, part: Slice) -> Loss:
        """The loss of the slice ``part``, from its evaluation."""


@dataclass(frozen=True, kw_only=True)
class ActorCritic:
    """PPO with a value head: the loss of ``actor`` plus the value loss, both from one evaluation (arXiv 1707.06347).

    ``clip``: the largest change of a value from its prediction during the rollout; None does not clip. The policy, which owns the
    value head, determines how much of the value loss reaches its own weights.
    """

    actor: Actor
    clip: float | None = None

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        from retouch.core.gae import clipped_value_loss

        trajectory = minibatch.trajectory
        assert trajectory.values is not None, "the policy has a value head"
        assert minibatch.returns is not None, "the advantage computes returns for the value head"
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
        """Do nothing: the current weights sample the rollouts, so there are no old weights to update."""
