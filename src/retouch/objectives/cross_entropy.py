"""Supervised learning of a policy of tokens: cross-entropy on the tasks' own completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from retouch.objectives.base import Objective, ObjectiveContext
from retouch.protocols import Policy
from retouch.types import Loss, Minibatch, Needs

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class TokenPolicy(Policy, Protocol):
    """A policy of tokens as this objective sees it."""

    def order_by_length(self, trajectory: Any) -> Int[Tensor, " b"]:
        """An order of the rows in which neighbours have similar lengths."""
        ...


class CrossEntropy(Objective):
    """Cross-entropy of the tokens of the tasks' own completions (``completion`` in their meta), for policies that write tokens.
    The policy's own temperature applies. A microbatch takes rows of similar length, which changes memory and time only.

    Example::

        >>> retouch.CrossEntropy(normalise="sequence").imitates
        True
    """

    kind: Literal["sft"] = "sft"
    normalise: Literal["sequence", "token"] = "token"
    """How tokens share the loss: equally within a completion, or equally over all completions."""

    imitates: ClassVar[bool] = True

    def losses(self, policy: TokenPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        order = policy.order_by_length(minibatch.trajectory)
        trajectory, weights = minibatch.trajectory.take(order), minibatch.weights[order]
        for part in policy.microbatches(trajectory):
            evaluation = policy.evaluate(trajectory, part, Needs())
            value = -(weights[part.rows, part.actions] * evaluation.log_probs).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    @property
    def loss_weights(self) -> Literal["sequence", "token", "dr_grpo"]:
        return self.normalise

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        if not context.writes_tokens:
            yield f"{context.objective}.kind: sft imitates written completions; supervised imitates target images"
