"""DiffusionNFT (arXiv 2509.16117) and AWM (arXiv 2509.25050): objectives on the forward process. They need only images and rewards
and no log-probabilities, so any sampler may have made the images.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from pydantic import Field

from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.core.random import generator
from retouch.objectives.base import Objective, ObjectiveContext
from retouch.protocols import InitialNoisePolicy, VelocityPolicy
from retouch.types import Batch, Loss, Minibatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ForwardProcess(Objective):
    """An objective that evaluates velocities at points x_sigma = (1 - sigma) x0 + sigma * noise.

    With s ``uniform`` on (0, 1), or ``logit_normal`` (the logistic of a standard normal), sigma = shift s / (1 + (shift - 1) s)
    (Esser et al. 2024, arXiv 2403.03206).
    """

    sigma_sampling: Literal["logit_normal", "uniform"] = "uniform"
    """How sigma is drawn between 0 (data) and 1 (noise)."""
    shift: Positive = 1.0
    """Values above 1 draw sigma closer to 1. Small images need this, because the prompt matters only at sigmas close to 1."""

    def draw_points(
        self,
        x0: Float[Tensor, "r ..."],
        batch: Batch,
        rows: slice,
        *,
        purpose: str,
        epoch: int,
        draw: int,
        noise: Float[Tensor, "r ..."] | None = None,
    ) -> tuple[Float[Tensor, "r ..."], Float[Tensor, "r ..."], Float[Tensor, " r"]]:
        """One point of the forward process for each row: (x_sigma, noise, sigma), with sigma in [1e-4, 1].

        Draws are keyed by (seed, purpose, step, group, slot, epoch, draw). ``noise``: the noise of each row, in place of drawn
        noise; sigma is the same with and without it.

        Source: flow matching with straight paths (Lipman et al. 2023, arXiv 2210.02747; rectified flow, arXiv 2209.03003).
        """
        import torch

        noises, sigmas = [], []
        for group, slot in zip(batch.group[rows], batch.slot[rows], strict=True):
            key = generator(batch.seed, purpose, batch.step, batch.group_ids[group], slot, epoch, draw)
            uniform = self.sigma_sampling == "uniform"
            sigmas.append(torch.rand((), generator=key) if uniform else torch.sigmoid(torch.randn((), generator=key)))
            if noise is None:
                noises.append(torch.randn(x0.shape[1:], generator=key))
        noise = torch.stack(noises).to(x0.device) if noise is None else noise
        sigma = torch.stack(sigmas).to(x0.device)
        sigma = (self.shift * sigma / (1 + (self.shift - 1) * sigma)).clamp(1e-4, 1.0)
        spread = sigma.view(-1, *[1] * (x0.dim() - 1))
        return (1 - spread) * x0 + spread * noise, noise, sigma


class SampledPoints(ForwardProcess):
    """A ``ForwardProcess`` that draws several points per image."""

    samples: Count = 1
    """Number of points (noise and sigma) drawn per image (per pair for ``dpo``)."""


def squared_distance(velocity: Float[Tensor, "r ..."], target: Float[Tensor, "r ..."]) -> Float[Tensor, " r"]:
    """Mean squared difference of two velocities over a latent's elements: ``velocity_mse`` in a file that does not import torch."""
    return (velocity - target).square().flatten(1).mean(dim=1)


def relative_error(error: Float[Tensor, "r ..."]) -> Float[Tensor, " r"]:
    """Mean square of an error over a latent's elements, divided by its mean absolute value, which is detached."""
    return error.square().flatten(1).mean(dim=1) / error.detach().abs().flatten(1).mean(dim=1).clamp_min(1e-5)


class NormGuard(Section):
    """A hinge on the norm of the velocity: weight * max(|v| / |v_ref| - 1 - margin, 0) is added to the loss of a row, |v| over all
    elements of a latent.

    Training on rewards makes velocities longer than those of the reference, which shows as too much sharpness and saturation.
    Source: the idea of NormGuard (arXiv 2606.27771), a penalty of what exceeds the norm of the reference. Its formula may differ.
    """

    weight: Positive
    """Weight of the hinge in the loss."""
    margin: NonNegative = 0.0
    """The share by which a velocity may be longer than that of the reference."""


class NearReference(SampledPoints):
    """An objective that can keep its velocity close to the reference's."""

    reference_weight: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    norm_guard: NormGuard | None = Field(default=None, exclude_if=lambda guard: guard is None)
    """A penalty of velocities that are longer than those of the reference; null adds none."""

    @property
    def compares_reference(self) -> bool:
        """Whether the loss needs the reference's velocity."""
        return self.reference_weight > 0 or self.norm_guard is not None

    def penalty(
        self, velocity: Float[Tensor, "r ..."], reference: Float[Tensor, "r ..."]
    ) -> tuple[Float[Tensor, " r"], dict[str, Float[Tensor, " r"]]]:
        """What is added to the loss of each row, and the metrics of each row, without gradient."""
        distance = squared_distance(velocity, reference)
        told = {"policy/kl": distance.detach()} if self.reference_weight else {}
        added = self.reference_weight * distance
        if self.norm_guard is not None:
            ratio = velocity.flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1).clamp_min(1e-5)
            added = added + self.norm_guard.weight * (ratio - 1 - self.norm_guard.margin).clamp_min(0.0)
            told["policy/velocity_norm"] = ratio.detach()
        return added, told


class OldDecay(Section):
    """How the old policy follows the current one: after step n it becomes d * old + (1 - d) * current,
    d = min(rate * max(n - flat, 0), max).

    Source: DiffusionNFT (arXiv 2509.16117), whose sampling policy is an average of the trained one. Its published code has three
    schedules: rate 0 (the old policy is the current one), the default, and a slow one with flat 75, rate 0.0075 and max 0.999.
    """

    flat: Annotated[int, Field(ge=0)] = Field(default=0, exclude_if=operator.not_)
    """Number of steps before d grows; until then the old policy equals the current one."""
    rate: NonNegative = 0.001
    """Growth of d per step."""
    max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Largest d."""

    def at(self, step: int) -> float:
        """d after optimizer step ``step``, from 1."""
        return min(self.rate * max(step - self.flat, 0), self.max)


class AgainstOld(NearReference):
    """An objective that compares the current policy with an old one, which follows it."""

    advantage_clip: Positive = 5.0
    """Advantage at which an image counts as entirely good (or, if negative, entirely bad)."""
    old_decay: OldDecay = OldDecay()
    """How the old policy follows the current one."""

    needs_both_signs: ClassVar[bool] = True
    needs_velocities: ClassVar[bool] = True

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"old", "reference"} if self.compares_reference else {"old"})

    def goodness(self, advantages: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        """From 0, entirely bad, to 1, entirely good."""
        return (advantages / (2 * self.advantage_clip) + 0.5).clamp(0.0, 1.0)

    def after_step(self, policy: VelocityPolicy, step: int) -> None:
        """Move the old policy towards the current one."""
        policy.follow_old(self.old_decay.at(step))


class NFT(AgainstOld):
    """DiffusionNFT: move towards good images and away from bad ones, both relative to the old policy.

    The advantage A of a row gives r = clip(A / (2 advantage_clip) + 1/2, 0, 1). At a drawn point of the forward process, the old
    velocity v_old and the current velocity v give v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v. The loss of a
    row is [ r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w- ] / beta + reference_weight |v - v_ref|^2. Here, x0(v) = x -
    sigma v is the predicted image; w+ is the mean of |x0(v+) - x0| and w- that of |x0(v-) - x0|, both detached and at least 1e-5.
    Norms are means over a latent's elements. An advantage of 0 does not give a loss of 0: the sum of both terms then pulls the
    policy towards the old one.

    Example::

        >>> retouch.NFT(beta=0.5).beta
        0.5
    """

    kind: Literal["nft"] = "nft"
    beta: Positive = 1.0
    """How far the positive and the negative velocity lie from the old one."""
    advantages: Literal["all", "positive", "negative", "indicator", "sign"] = Field(
        default="all", exclude_if=lambda chosen: chosen == "all"
    )
    """How the advantages A are used, as in the published code. ``all``: unchanged. ``positive``, ``negative``: the advantages of
    the other sign are set to 0. ``indicator``: 1 for A > 0, else 0. ``sign``: -1, 0 or 1."""

    acts_with: ClassVar[Literal["current", "old"]] = "old"

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for draw in range(self.samples):
            for rows in policy.row_slices(trajectory):
                x0 = trajectory.outputs[rows]
                x, _, sigma = self.draw_points(x0, minibatch.batch, rows, purpose="nft", epoch=minibatch.epoch, draw=draw)
                weights = minibatch.weights[rows].sum(dim=1) / self.samples  # a row counts whole, however many actions made it
                old = policy.velocity(trajectory, rows, x, sigma, "old")
                velocity = policy.velocity(trajectory, rows, x, sigma, "current")
                goodness = self.goodness(self._used(minibatch.advantages[rows, 0]))
                positive = self.beta * velocity + (1 - self.beta) * old
                negative = (1 + self.beta) * old - self.beta * velocity
                spread = sigma.view(-1, *[1] * (x.dim() - 1))
                better, worse = (relative_error(x - spread * tilted - x0) for tilted in (positive, negative))
                loss = (goodness * better + (1 - goodness) * worse) / self.beta
                sums = {"policy/old_distance": (weights * squared_distance(velocity.detach(), old)).sum()}
                if self.compares_reference:
                    penalty, told = self.penalty(velocity, policy.velocity(trajectory, rows, x, sigma, "reference"))
                    loss = loss + penalty
                    sums |= {name: (weights * value).sum() for name, value in told.items()}
                value = (weights * loss).sum()
                yield Loss(value, {"policy/loss": value.detach(), **sums})

    def _used(self, advantages: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        """The advantages that the loss uses."""
        match self.advantages:
            case "all":
                return advantages
            case "positive":
                return advantages.clamp_min(0.0)
            case "negative":
                return advantages.clamp_max(0.0)
            case "indicator":
                return (advantages > 0).to(advantages.dtype)
            case "sign":
                return advantages.sign()


class AWM(NearReference):
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
    noise: Literal["drawn", "initial"] = Field(default="drawn", exclude_if=lambda chosen: chosen == "drawn")
    """The noise of the points. ``drawn``: new noise for every point. ``initial``: the noise z from which the image was sampled, so
    the loss is A |v((1 - sigma) x0 + sigma z, sigma) - (z - x0)|^2, that of reflow (Liu et al. 2022, arXiv 2209.03003). The policy
    learns to go from z to its image on a straight line, for which few denoising steps are enough. Needs transition ``ode``."""

    needs_velocities: ClassVar[bool] = True
    can_pair_noise: ClassVar[bool] = True

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.compares_reference else frozenset()

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
                if self.compares_reference:
                    penalty, told = self.penalty(velocity, policy.velocity(trajectory, rows, x, sigma, "reference"))
                    loss = loss + penalty
                    sums |= {name: (weights * value).sum() for name, value in told.items()}
                value = (weights * loss).sum()
                yield Loss(value, {"policy/loss": value.detach(), **sums})
