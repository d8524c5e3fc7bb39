"""Supervised learning of a writer: cross-entropy of the tokens of the tasks' own completions."""

from collections.abc import Iterator
from typing import Any, Protocol

from jaxtyping import Int
from torch import Tensor

from retouch.protocols import Policy
from retouch.types import Loss, Minibatch, Needs


class WritingPolicy(Policy, Protocol):
    """What the objective asks of a policy of tokens."""

    def alike(self, trajectory: Any) -> Int[Tensor, " b"]:
        """An order of the rows in which neighbours are of alike length."""
        ...


class CrossEntropy:
    """Minus the log-probability of each token that was to be written, weighted; under the policy's own temperature.

    A microbatch takes rows of alike length, wherever they stand in the minibatch; that changes memory and time alone.
    """

    def losses(self, policy: WritingPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        order = policy.alike(minibatch.trajectory)
        trajectory, weights = minibatch.trajectory.take(order), minibatch.weights[order]
        for part in policy.microbatches(trajectory):
            evaluation = policy.evaluate(trajectory, part, Needs())
            value = -(weights[part.rows, part.actions] * evaluation.log_probs).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: there is no second policy."""
