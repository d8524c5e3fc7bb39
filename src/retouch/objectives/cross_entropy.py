"""Supervised learning of a writer: cross-entropy of the tokens of the tasks' own completions."""

from collections.abc import Iterator
from typing import Any

from retouch.types import Loss, Minibatch, Needs, Policy


class CrossEntropy:
    """Minus the log-probability of each token that was to be written, weighted; under the policy's own temperature."""

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        for part in policy.microbatches(minibatch.trajectory):
            weights = minibatch.weights[part.rows, part.actions]
            evaluation = policy.evaluate(minibatch.trajectory, part, Needs())
            value = -(weights * evaluation.log_probs).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: there is no second policy."""
