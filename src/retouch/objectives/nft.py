"""DiffusionNFT: policy optimisation on the forward process, from pictures and rewards alone (Zheng et al. 2025, arXiv 2509.16117).

No log-probability is needed, so any sampler may have made the pictures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from retouch.objectives.flow_matching import draw_points, mismatch
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch


@dataclass(frozen=True, kw_only=True)
class NFT:
    """Pull towards good pictures and push away from bad ones, both measured from the old policy.

    With r = clip(A / (2 advantage_clip) + 1/2, 0, 1) and, at a drawn point of the forward process,
    v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v, the loss of a row is
    [ r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w- ] / beta + reference_weight |v - v_ref|^2, where
    x0(v) = x - sigma v and w = mean |x0(v) - x0|, detached, at least 1e-5. Norms are means over a latent's elements.
    ``draws``: points a row. The old policy follows by old = d old + (1 - d) current after each step, with
    d = min(old_rate * step, old_max). A zero advantage is not a zero loss: it pulls both ways towards the old policy.
    """

    beta: float = 1.0
    advantage_clip: float = 5.0
    reference_weight: float = 0.0
    old_rate: float = 0.001
    old_max: float = 0.5
    draws: int = 1
    sigma_sampling: Literal["uniform", "logit_normal"] = "uniform"
    shift: float = 1.0

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for draw in range(self.draws):
            for rows in policy.row_slices(trajectory):
                x0 = trajectory.outputs[rows]
                x, _, sigma = draw_points(
                    x0,
                    minibatch.batch,
                    rows,
                    purpose="nft",
                    epoch=minibatch.epoch,
                    draw=draw,
                    sigma_sampling=self.sigma_sampling,
                    shift=self.shift,
                )
                weights = minibatch.weights[rows].sum(dim=1) / self.draws  # a row counts whole, however many actions made it
                old = policy.velocity(trajectory, rows, x, sigma, "old")
                velocity = policy.velocity(trajectory, rows, x, sigma, "current")
                goodness = (minibatch.advantages[rows, 0] / (2 * self.advantage_clip) + 0.5).clamp(0.0, 1.0)
                loss = (
                    goodness * self._miss(self.beta * velocity + (1 - self.beta) * old, x, x0, sigma)
                    + (1 - goodness) * self._miss((1 + self.beta) * old - self.beta * velocity, x, x0, sigma)
                ) / self.beta
                sums = {"policy/old_distance": (weights * mismatch(velocity.detach(), old)).sum()}
                if self.reference_weight:
                    distance = mismatch(velocity, policy.velocity(trajectory, rows, x, sigma, "reference"))
                    loss = loss + self.reference_weight * distance
                    sums["policy/kl"] = (weights * distance.detach()).sum()
                value = (weights * loss).sum()
                yield Loss(value, {"policy/loss": value.detach(), **sums})

    def after_step(self, policy: VelocityPolicy, step: int) -> None:
        """Let the old policy follow."""
        policy.follow_old(min(self.old_rate * step, self.old_max))

    @staticmethod
    def _miss(velocity: Tensor, x: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
        """Squared distance of the predicted clean picture to the one that was made, over its detached mean absolute value: (r,)."""
        miss = x - sigma.view(-1, *[1] * (x.dim() - 1)) * velocity - x0
        return _mean(miss.square()) / _mean(miss.detach().abs()).clamp_min(1e-5)


def _mean(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).mean(dim=1)
