"""Supervised flow matching: regress the velocity towards noise - data on the targets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from retouch.objectives.flow_matching import draw_points, mismatch
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Mean squared error of the velocity at one drawn point a row (Lipman et al. 2023; sampling of sigma: Esser et al. 2024)."""

    sigma_sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    shift: float = 1.0

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for rows in policy.row_slices(trajectory):
            x0 = trajectory.outputs[rows]
            x, noise, sigma = draw_points(
                x0,
                minibatch.batch,
                rows,
                purpose="supervised",
                epoch=minibatch.epoch,
                draw=0,
                sigma_sampling=self.sigma_sampling,
                shift=self.shift,
            )
            velocity = policy.velocity(trajectory, rows, x, sigma, "current")
            error = mismatch(velocity, noise - x0)
            value = (minibatch.weights[rows, 0] * error).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: there is no second policy."""
