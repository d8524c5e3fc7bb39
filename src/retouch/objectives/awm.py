"""Advantage-weighted matching: the supervised loss on the policy's own images, times their advantage (Xue et al. 2025, arXiv
2509.25050).

The matching loss at a point of the forward process bounds the likelihood of an image, so its gradient times the advantage is a
policy gradient without a chain of transitions: any sampler may have made the images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, cast

from pydantic import Field

from retouch.config.section import NonNegative
from retouch.objectives.base import ObjectiveContext
from retouch.objectives.flow_matching import SampledPoints, squared_distance
from retouch.protocols import InitialNoisePolicy, VelocityPolicy
from retouch.types import Loss, Minibatch


class AWM(SampledPoints):
    """Advantage-weighted matching. Loss of a row: A |v - (noise - x0)|^2 + reference_weight |v - v_ref|^2, norms as means over a
    latent's elements. The loss of a negative advantage has no bound, so take one optimizer step per rollout and set
    ``reference_weight``. With ``BestAdvantage`` this is best-of-n fine-tuning (RAFT), with ``ExponentialAdvantage`` it is
    reward-weighted regression; the advantages of both are at least 0.

    Source: Xue et al. 2025 (arXiv 2509.25050).

    Example::

        >>> retouch.AWM(reference_weight=0.1).reference_weight
        0.1
    """

    kind: Literal["awm"] = "awm"
    reference_weight: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    noise: Literal["drawn", "initial"] = Field(default="drawn", exclude_if=lambda chosen: chosen == "drawn")
    """The noise of the points. ``drawn``: new noise for every point. ``initial``: the noise z from which the image was sampled, so
    the loss is A |v((1 - sigma) x0 + sigma z, sigma) - (z - x0)|^2, that of reflow (Liu et al. 2022, arXiv 2209.03003). The policy
    learns to go from z to its image on a straight line, for which few denoising steps are enough. Needs transition ``ode``."""

    needs_velocities: ClassVar[bool] = True
    can_pair_noise: ClassVar[bool] = True

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.reference_weight > 0 else frozenset()

    @property
    def needs_initial_noise(self) -> bool:
        return self.noise == "initial"

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        yield from super().problems(context)
        if self.noise == "drawn" or context.is_autoregressive:
            return
        if context.stochastic:
            why = "the transitions add more noise, so an image has no single noise that it was sampled from"
            yield f"{context.objective}.noise: {why}; set {context.rollout}.transition.kind to ode, or noise to 'drawn'"
        if context.engine:
            yield f"{context.objective}.noise: an engine returns no initial noise; remove {context.rollout}.engine, or use 'drawn'"

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for draw in range(self.samples):
            for rows in policy.row_slices(trajectory):
                x0 = trajectory.outputs[rows]
                paired = cast("InitialNoisePolicy", policy).initial_noise(trajectory, rows) if self.needs_initial_noise else None
                x, noise, sigma = self.draw_points(
                    x0, minibatch.batch, rows, purpose="awm", epoch=minibatch.epoch, draw=draw, noise=paired
                )
                weights = minibatch.weights[rows].sum(dim=1) / self.samples  # a row counts whole, however many actions made it
                velocity = policy.velocity(trajectory, rows, x, sigma, "current")
                error = squared_distance(velocity, noise - x0)
                loss = minibatch.advantages[rows, 0] * error
                sums = {"policy/matching": (weights * error.detach()).sum()}
                if self.reference_weight:
                    distance = squared_distance(velocity, policy.velocity(trajectory, rows, x, sigma, "reference"))
                    loss = loss + self.reference_weight * distance
                    sums["policy/kl"] = (weights * distance.detach()).sum()
                value = (weights * loss).sum()
                yield Loss(value, {"policy/loss": value.detach(), **sums})
