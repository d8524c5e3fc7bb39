"""Advantage-weighted matching: the supervised loss on the policy's own pictures, weighted by advantage (Xue et al. 2025, arXiv
2509.25050).

The matching loss at a point of the forward process bounds the likelihood of a picture, so its gradient times the advantage is a
policy gradient without a chain of transitions: any sampler may have made the pictures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from retouch.objectives.flow_matching import draw_points, mismatch
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch


@dataclass(frozen=True, kw_only=True)
class AWM:
    """Loss of a row: A |v - (noise - x0)|^2 + reference_weight |v - v_ref|^2, norms as means over a latent's elements.

    A negative advantage pushes away without a bound, so this is for one step on fresh pictures; ``reference_weight`` holds the rest
    in place. ``draws``: points a row.
    """

    reference_weight: float = 0.0
    draws: int = 1
    sigma_sampling: Literal["uniform", "logit_normal"] = "uniform"
    shift: float = 1.0

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for draw in range(self.draws):
            for rows in policy.row_slices(trajectory):
                x0 = trajectory.outputs[rows]
                x, noise, sigma = draw_points(
                    x0,
                    minibatch.batch,
                    rows,
                    purpose="awm",
                    epoch=minibatch.epoch,
                    draw=draw,
                    sigma_sampling=self.sigma_sampling,
                    shift=self.shift,
                )
                weights = minibatch.weights[rows].sum(dim=1) / self.draws  # a row counts whole, however many actions made it
                velocity = policy.velocity(trajectory, rows, x, sigma, "current")
                error = mismatch(velocity, noise - x0)
                loss = minibatch.advantages[rows, 0] * error
                sums = {"policy/matching": (weights * error.detach()).sum()}
                if self.reference_weight:
                    distance = mismatch(velocity, policy.velocity(trajectory, rows, x, sigma, "reference"))
                    loss = loss + self.reference_weight * distance
                    sums["policy/kl"] = (weights * distance.detach()).sum()
                value = (weights * loss).sum()
                yield Loss(value, {"policy/loss": value.detach(), **sums})

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: there is no second policy that follows."""
