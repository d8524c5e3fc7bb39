"""Diffusion DPO on the best and the worst image of each group (Wallace et al. 2023, arXiv 2311.12908, for flow matching)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.config.section import Positive
from retouch.objectives.flow_matching import SampledPoints, squared_distance
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class DPO(SampledPoints):
    """Diffusion DPO: the best image of each group is preferred to the worst. Loss of a pair:
    - log sigmoid(- beta [ (e(best) - e_ref(best)) - (e(worst) - e_ref(worst)) ]).

    e is the squared error of the velocity, a mean over a latent's elements, at one point of the forward process; both images of a
    pair share its noise and sigma. A pair has the weight of its group. A group of equal advantages, or with fewer than two judged
    images on this rank, has weight 0.
    """

    kind: Literal["dpo"] = "dpo"
    beta: Positive = 2000.0
    """The paper's beta T: larger values stay closer to the reference."""

    needs_velocities: ClassVar[bool] = True
    learns_from_pairs: ClassVar[bool] = True

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"reference"})

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        """One share per group and draw, also for a group without a pair, so that all ranks yield equally many."""
        from torch.nn.functional import logsigmoid

        weights = minibatch.weights.sum(dim=1)
        for draw in range(self.samples):
            for members in _groups(minibatch.batch.group):
                best, worst = _extremes(minibatch, members)
                weight = weights[members].sum() / self.samples * float(best != worst)
                margin = self._margin(policy, minibatch, best, worst, draw)
                value = -weight * logsigmoid(self.beta * margin)
                yield Loss(value, {"policy/loss": value.detach(), "policy/preferred": weight * (margin.detach() > 0)})

    def _margin(self, policy: VelocityPolicy, minibatch: Minibatch, best: int, worst: int, draw: int) -> Float[Tensor, ""]:
        """How much more the error of the best image has fallen since the reference than that of the worst."""
        low, high = sorted((best, worst))
        rows = slice(low, high + 1, max(1, high - low))
        trajectory, batch = minibatch.trajectory, minibatch.batch
        x0 = trajectory.outputs[rows]
        of_group = replace(batch, slot=(0,) * len(batch))  # the point of a pair depends on its group alone
        x, noise, sigma = self.draw_points(x0, of_group, rows, purpose="dpo", epoch=minibatch.epoch, draw=draw)
        velocity = policy.velocity(trajectory, rows, x, sigma, "current")
        reference = policy.velocity(trajectory, rows, x, sigma, "reference")
        improvement = squared_distance(reference, noise - x0) - squared_distance(velocity, noise - x0)
        return improvement[0 if best == low else -1] - improvement[0 if worst == low else -1]


def _groups(group: Sequence[int]) -> list[list[int]]:
    """The rows of each group."""
    return [[row for row, of in enumerate(group) if of == number] for number in sorted(set(group))]


def _extremes(minibatch: Minibatch, members: Sequence[int]) -> tuple[int, int]:
    """The rows with the largest and the smallest advantage among those with weight; the same row twice if all are equal."""
    counted = [row for row in members if minibatch.weights[row].sum() > 0] or [members[0]]
    advantages = minibatch.advantages[counted, 0]
    best, worst = int(advantages.argmax()), int(advantages.argmin())
    return (counted[best], counted[worst]) if bool(advantages[best] != advantages[worst]) else (counted[0], counted[0])
