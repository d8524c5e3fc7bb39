"""DiffusionNFT: policy optimisation on the forward process, from images and rewards alone (Zheng et al. 2025, arXiv 2509.16117).

It needs no log-probability, so any sampler may have made the images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.section import NonNegative, Positive, Section
from retouch.objectives.flow_matching import SampledPoints, squared_distance
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class OldDecay(Section):
    """How the old policy follows the current one: after step n it becomes d * old + (1 - d) * current, d = min(rate * n, max).

    Source: DiffusionNFT (arXiv 2509.16117), whose sampling policy is an average of the trained one.
    """

    rate: NonNegative = 0.001
    """Growth of d per step."""
    max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Largest d."""


class NFT(SampledPoints):
    """DiffusionNFT: move towards good images and away from bad ones, both relative to the old policy.

    With r = clip(A / (2 advantage_clip) + 1/2, 0, 1) and, at a drawn point of the forward process,
    v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v, the loss of a row is
    [ r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w- ] / beta + reference_weight |v - v_ref|^2, where
    x0(v) = x - sigma v and w = mean |x0(v) - x0|, detached, at least 1e-5. Norms are means over a latent's elements.
    A zero advantage is not a zero loss: it pulls both ways towards the old policy.

    Example::

        >>> retouch.NFT(beta=0.5).beta
        0.5
    """

    kind: Literal["nft"] = "nft"
    beta: Positive = 1.0
    """How far the positive and the negative velocity lie from the old one."""
    advantage_clip: Positive = 5.0
    """Advantage at which an image counts as entirely good (or, if negative, entirely bad)."""
    reference_weight: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    old_decay: OldDecay = OldDecay()
    """How the old policy follows."""

    acts_with: ClassVar[Literal["current", "old"]] = "old"
    needs_velocities: ClassVar[bool] = True

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"old", "reference"} if self.reference_weight > 0 else {"old"})

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for draw in range(self.samples):
            for rows in policy.row_slices(trajectory):
                x0 = trajectory.outputs[rows]
                x, _, sigma = self.draw_points(x0, minibatch.batch, rows, purpose="nft", epoch=minibatch.epoch, draw=draw)
                weights = minibatch.weights[rows].sum(dim=1) / self.samples  # a row counts whole, however many actions made it
                old = policy.velocity(trajectory, rows, x, sigma, "old")
                velocity = policy.velocity(trajectory, rows, x, sigma, "current")
                goodness = (minibatch.advantages[rows, 0] / (2 * self.advantage_clip) + 0.5).clamp(0.0, 1.0)
                positive = self.beta * velocity + (1 - self.beta) * old
                negative = (1 + self.beta) * old - self.beta * velocity
                loss = (
                    goodness * _reconstruction_loss(positive, x, x0, sigma)
                    + (1 - goodness) * _reconstruction_loss(negative, x, x0, sigma)
                ) / self.beta
                sums = {"policy/old_distance": (weights * squared_distance(velocity.detach(), old)).sum()}
                if self.reference_weight:
                    distance = squared_distance(velocity, policy.velocity(trajectory, rows, x, sigma, "reference"))
                    loss = loss + self.reference_weight * distance
                    sums["policy/kl"] = (weights * distance.detach()).sum()
                value = (weights * loss).sum()
                yield Loss(value, {"policy/loss": value.detach(), **sums})

    def after_step(self, policy: VelocityPolicy, step: int) -> None:
        """The old policy follows the current one."""
        policy.follow_old(min(self.old_decay.rate * step, self.old_decay.max))


def _reconstruction_loss(velocity: Tensor, x: Tensor, x0: Tensor, sigma: Tensor) -> Float[Tensor, " r"]:
    """Squared error of the predicted clean image, over its detached mean absolute value."""
    error = x - sigma.view(-1, *[1] * (x.dim() - 1)) * velocity - x0
    return _mean(error.square()) / _mean(error.detach().abs()).clamp_min(1e-5)


def _mean(tensor: Tensor) -> Float[Tensor, " r"]:
    return tensor.flatten(1).mean(dim=1)
