"""Supervised flow matching: regress the velocity on noise - data, for the target images of the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from retouch.objectives.flow_matching import ForwardProcess, squared_distance
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch


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
