"""Diffusion DPO on the best and the worst picture of each group (Wallace et al. 2023, arXiv 2311.12908, for flow matching)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from retouch.objectives.flow_matching import draw_points, mismatch
from retouch.protocols import VelocityPolicy
from retouch.types import Loss, Minibatch


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Loss of a pair: - log sigmoid(- beta [ (e(best) - e_ref(best)) - (e(worst) - e_ref(worst)) ]).

    e is the squared error of the velocity, a mean over a latent's elements, at one point of the forward process, whose noise and
    sigma both pictures of a pair share. ``beta`` is the paper's beta T, as large as these means are small. A pair weighs what its
    group weighs; a group of equal advantages, or with fewer than two judged pictures on this rank, weighs nothing. ``draws``:
    points a pair.
    """

    beta: float = 2000.0
    draws: int = 1
    sigma_sampling: Literal["uniform", "logit_normal"] = "uniform"
    shift: float = 1.0

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        """One share a group and draw, also where there is no pair: ranks with as many groups keep step."""
        weights = minibatch.weights.sum(dim=1)
        for draw in range(self.draws):
            for members in _groups(minibatch.batch.group):
                best, worst = _extremes(minibatch, members)
                weight = weights[members].sum() / self.draws * float(best != worst)
                margin = self._margin(policy, minibatch, best, worst, draw)
                value = -weight * logsigmoid(self.beta * margin)
                yield Loss(value, {"policy/loss": value.detach(), "policy/preferred": weight * (margin.detach() > 0)})

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: there is no second policy that follows."""

    def _margin(self, policy: VelocityPolicy, minibatch: Minibatch, best: int, worst: int, draw: int) -> Float[Tensor, ""]:
        """By how much more the best has come nearer since the reference than the worst."""
        low, high = sorted((best, worst))
        rows = slice(low, high + 1, max(1, high - low))
        trajectory, batch = minibatch.trajectory, minibatch.batch
        x0 = trajectory.outputs[rows]
        x, noise, sigma = draw_points(
            x0,
            replace(batch, slot=(0,) * len(batch)),  # what a pair is measured at hangs on its group alone
            rows,
            purpose="dpo",
            epoch=minibatch.epoch,
            draw=draw,
            sigma_sampling=self.sigma_sampling,
            shift=self.shift,
        )
        velocity = policy.velocity(trajectory, rows, x, sigma, "current")
        reference = policy.velocity(trajectory, rows, x, sigma, "reference")
        nearer = mismatch(reference, noise - x0) - mismatch(velocity, noise - x0)
        return nearer[0 if best == low else -1] - nearer[0 if worst == low else -1]


def _groups(group: Sequence[int]) -> list[list[int]]:
    """The rows of each group."""
    return [[row for row, of in enumerate(group) if of == number] for number in sorted(set(group))]


def _extremes(minibatch: Minibatch, members: Sequence[int]) -> tuple[int, int]:
    """The rows with the largest and with the smallest advantage among those that count; one and the same where none stands out."""
    counted = [row for row in members if minibatch.weights[row].sum() > 0] or [members[0]]
    advantages = minibatch.advantages[counted, 0]
    best, worst = int(advantages.argmax()), int(advantages.argmin())
    return (counted[best], counted[worst]) if torch.ne(advantages[best], advantages[worst]) else (counted[0], counted[0])
