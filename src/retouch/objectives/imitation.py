"""Imitation of the tasks' targets: cross-entropy for tokens, flow matching for denoisers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from retouch.objectives.base import Objective, ObjectiveContext
from retouch.objectives.nft import ForwardProcess, squared_distance
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch, Needs


class CrossEntropy(Objective):
    """Cross-entropy on the completions of the tasks (``completion`` in their meta), for policies that write tokens. Logits are
    divided by the policy's temperature. A microbatch consists of rows of similar length, which affects only memory and time.

    Example::

        >>> retouch.CrossEntropy(normalise="sequence").imitates
        True
    """

    kind: Literal["sft"] = "sft"
    normalise: Literal["sequence", "token"] = "token"
    """How the loss is averaged over tokens. ``sequence``: every completion has the same weight. ``token``: every token of all
    completions has the same weight."""

    imitates: ClassVar[bool] = True

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        order = policy.order_by_length(minibatch.trajectory)  # of a policy that writes tokens
        trajectory, weights = minibatch.trajectory.take(order), minibatch.weights[order]
        for part in policy.microbatches(trajectory):
            evaluation = policy.evaluate(trajectory, part, Needs())
            value = -(weights[part.rows, part.actions] * evaluation.log_probs).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    @property
    def loss_weights(self) -> Literal["sequence", "token", "dr_grpo"]:
        return self.normalise

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        if not context.is_autoregressive:
            yield f"{context.objective}.kind: sft learns from completions of text; use supervised to learn from target images"


class Supervised(ForwardProcess):
    """Flow matching on the target images of the tasks: the mean squared error of the velocity at one drawn point per row (Lipman et
    al. 2023, arXiv 2210.02747).

    Example::

        >>> retouch.Supervised(sigma_sampling="uniform").imitates
        True
    """

    kind: Literal["supervised"] = "supervised"
    sigma_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """How sigma is drawn between 0 (data) and 1 (noise)."""

    imitates: ClassVar[bool] = True
    needs_velocities: ClassVar[bool] = True
    for_tokens: ClassVar[str] = "sft"

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for rows in policy.row_slices(trajectory):
            x0 = trajectory.outputs[rows]
            x, noise, sigma = self.draw_points(x0, minibatch.batch, rows, purpose="supervised", epoch=minibatch.epoch, draw=0)
            error = squared_distance(policy.velocity(trajectory, rows, x, sigma, "current"), noise - x0)
            value = (minibatch.weights[rows, 0] * error).sum()
            yield Loss(value, {"policy/loss": value.detach()})
