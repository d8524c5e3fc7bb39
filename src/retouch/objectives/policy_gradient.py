"""Policy gradients: the clipped surrogate and its relatives under their usual names (GRPO, GSPO, CISPO, REINFORCE), with a KL
penalty and a value head.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field, PrivateAttr

from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.objectives.base import Objective, ObjectiveContext, ValueHead
from retouch.protocols import Policy, SupportsLosses
from retouch.types import Evaluation, Kind, Loss, Minibatch, Needs, Slice

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Actor(Protocol):
    """The policy gradient of an actor-critic."""

    @property
    def needs(self) -> Needs:
        """What the loss needs from an evaluation."""

    def loss(self, evaluation: Evaluation, minibatch: Minibatch, part: Slice) -> Loss:
        """The loss of the slice ``part``, from its evaluation."""


@dataclass(frozen=True, kw_only=True)
class ActorCritic:
    """PPO with a value head: the loss of ``actor`` plus the value loss, both from one evaluation (arXiv 1707.06347).

    ``clip``: the largest change of a value from its prediction during the rollout; None does not clip. The policy, which owns the
    value head, determines how much of the value loss reaches its own weights.
    """

    actor: Actor
    clip: float | None = None

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        from retouch.core.gae import clipped_value_loss

        trajectory = minibatch.trajectory
        assert trajectory.values is not None, "the policy has a value head"
        assert minibatch.returns is not None, "the advantage computes returns for the value head"
        needs = replace(self.actor.needs, values=True)
        for part in policy.microbatches(trajectory):
            evaluation = policy.evaluate(trajectory, part, needs)
            assert evaluation.values is not None
            loss = clipped_value_loss(
                evaluation.values,
                trajectory.values[part.rows, part.actions],
                minibatch.returns[part.rows, part.actions],
                clip=self.clip,
                mask=trajectory.mask[part.rows, part.actions],
            )
            value = (minibatch.weights[part.rows, part.actions] * loss).sum()
            acted = self.actor.loss(evaluation, minibatch, part)
            yield Loss(acted.value + value, {**acted.sums, "value/loss": value.detach()}, acted.maxima)

    def after_step(self, policy: Any, step: int) -> None:
        """Do nothing: the current weights sample the rollouts, so there are no old weights to update."""


_KINDS: dict[str, Sequence[int] | None] = {"all": None, "text": [Kind.TEXT_TOKEN], "vision": [Kind.IMAGE_TOKEN]}


class NoKl(Section):
    """No KL to the reference."""

    kind: Literal["none"] = "none"


class Kl(Section):
    """A KL to the reference in the loss: for transitions the closed form of two Gaussians or the mean squared difference of the
    velocities, for tokens the k3 estimate (Schulman, Approximating KL divergence, 2020).

    Example::

        >>> retouch.GRPO(clip=0.2, kl=retouch.Kl(kind="k3", weight=0.01)).kl.kind
        'k3'
    """

    kind: Literal["closed", "velocity", "k3"]
    weight: Positive
    """Weight of the KL in the loss."""


class TokenCycle(Section):
    """Text and image tokens train in turn: only text tokens in ``text_steps`` steps, then only image tokens in ``vision_steps``
    steps, and so on."""

    text_steps: Count = 10
    """Number of steps in which only text tokens train."""
    vision_steps: Count = 10
    """Number of steps in which only image tokens train."""


class PolicyGradient(Objective):
    """Policy gradient on the ratio of the current to the acting probability: GRPO and its variants.

    Example::

        >>> retouch.PolicyGradient(clip_low=0.2, clip_high=0.28, normalise="dr_grpo").surrogate
        'clip'
    """

    kind: Literal["policy_gradient"] = "policy_gradient"
    surrogate: Literal["clip", "cispo", "reinforce", "gspo"] = "clip"
    """``clip``: PPO's clipped ratio (arXiv 1707.06347). ``cispo``: a clipped weight on the log-probability (arXiv 2506.13585).
    ``reinforce``: no ratio. ``gspo``: PPO's clipped ratio, with one ratio for the whole chain or completion (arXiv 2507.18071)."""
    clip_low: Positive | None = None
    """The ratio is clipped below at 1 - clip_low; ``clip`` and ``gspo`` need it, ``cispo`` may have no lower bound."""
    clip_high: Positive | None = None
    """The ratio is clipped above at 1 + clip_high; all but ``reinforce`` need it. 1e-6 to 1e-4 is usual with reduction ``mean``."""
    dual: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: the loss of an action with a negative advantage A is at most dual * |A|; null sets no bound."""
    kl: Annotated[NoKl | Kl, Field(discriminator="kind")] = NoKl()
    """KL to the reference."""
    entropy_bonus: NonNegative = Field(default=0.0, exclude_if=operator.not_)
    """Weight of the mean entropy of the token distributions, which is subtracted from the loss so that the policy keeps exploring
    (Mnih et al. 2016, arXiv 1602.01783). Only for policies that write tokens."""
    ratio_norm: bool = False
    """Centre and scale the log-ratios of transitions (GRPO-Guard, arXiv 2510.22319). Only with surrogate ``clip``; with the
    transition ``sde``, every step then has the same gradient scale."""
    step_weights: Literal["equal", "noise"] = Field(default="equal", exclude_if=partial(operator.eq, "equal"))
    """The weight of each transition of a denoising chain in the loss: ``equal``, or proportional to the standard deviation of its
    ``noise``, with mean 1 over all steps of the chain that can train (TempFlow-GRPO, arXiv 2508.04324). Meant for the transition
    ``sde``, whose gradient is largest in the last steps; the log-probability of ``cps`` contains no variance."""
    normalise: Literal["sequence", "token", "dr_grpo"] = "sequence"
    """How the loss is averaged over actions. ``sequence``: every sample has the same weight, divided equally among its actions.
    ``token``: every action of all samples has the same weight. ``dr_grpo``: the sum over actions is divided by the number of
    samples and the longest possible length."""
    tokens: Literal["all", "text", "vision"] | TokenCycle = Field(default="all", exclude_if=lambda tokens: tokens == "all")
    """Which tokens train if a policy writes text and then an image. All tokens are sampled and affect the reward in any case. With
    gspo, the ratio of a row is that of the tokens that train."""

    has_value_loss: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = True
    _entropy: bool = PrivateAttr(default=False)

    def build(self, *, entropy: bool = False, value_head: ValueHead | None = None) -> SupportsLosses:
        """Build the objective of a run (see ``Objective.build``). Raises ValueError if a clip bound is missing."""
        self._check_bounds()
        objective = self.model_copy()
        objective._entropy = entropy
        if value_head is None:
            return objective
        return ActorCritic(actor=objective, clip=value_head.clip)

    @property
    def needs(self) -> Needs:
        """What the loss needs from an evaluation."""
        entropy = self._entropy or self.entropy_bonus > 0
        norm: Literal["plain", "norm"] = "norm" if self.ratio_norm else "plain"
        return Needs(kl=self.kl_kind, entropy=entropy, log_ratio=norm, step_weights=self.step_weights)

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        self._check_bounds()
        for part in policy.microbatches(minibatch.trajectory):
            yield self.loss(policy.evaluate(minibatch.trajectory, part, self.needs), minibatch, part)

    def loss(self, evaluation: Evaluation, minibatch: Minibatch, part: Slice) -> Loss:
        """The loss of the slice ``part``, from its evaluation. Raises ValueError if gspo gets only some of the actions of a row."""
        import torch

        mask = minibatch.trajectory.mask[part.rows, part.actions]
        weights = minibatch.weights[part.rows, part.actions]
        advantages = minibatch.advantages[part.rows, part.actions]
        self._check_whole_rows(mask.shape[1], minibatch.trajectory.mask.shape[1])
        # One ratio of a row has the gradient of all actions that it contains, whatever their weights.
        of_ratio = mask & (weights > 0) if self.one_ratio_per_row else mask
        loss = self._surrogate(evaluation, advantages, of_ratio)
        if evaluation.scale is not None:
            loss = loss * evaluation.scale
        if evaluation.kl is not None:
            assert isinstance(self.kl, Kl)
            loss = loss + self.kl.weight * torch.where(mask, evaluation.kl, 0.0)
        if self.entropy_bonus > 0:
            assert evaluation.entropy is not None
            loss = loss - self.entropy_bonus * torch.where(mask, evaluation.entropy, 0.0)
        value = (weights * loss).sum()
        clipped = None if self.surrogate == "reinforce" else self._clipped(evaluation.log_ratio.detach(), advantages, of_ratio)
        return Loss(value, *self._metrics(evaluation, clipped, mask, weights / minibatch.weight_sum, value))

    def _surrogate(self, evaluation: Evaluation, advantages: Tensor, mask: Tensor) -> Tensor:
        from retouch.core.surrogates import cispo, clipped_surrogate, reinforce, sequence_log_ratio

        low, high = self.clip_low, self.clip_high
        if self.surrogate == "reinforce":
            return reinforce(evaluation.log_probs, advantages, mask=mask)
        assert high is not None
        if self.surrogate == "cispo":
            return cispo(evaluation.log_ratio, evaluation.log_probs, advantages, mask=mask, low=low, high=high)
        assert low is not None
        log_ratio = sequence_log_ratio(evaluation.log_ratio, mask) if self.surrogate == "gspo" else evaluation.log_ratio
        return clipped_surrogate(log_ratio, advantages, mask=mask, low=low, high=high, dual=self.dual)

    def _metrics(
        self, evaluation: Evaluation, clipped: Tensor | None, mask: Tensor, weights: Tensor, value: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The loss, and means of which the ``weights`` of all ranks sum to 1; the maxima."""
        import torch

        from retouch.core.surrogates import approx_kl

        log_ratio = evaluation.log_ratio.detach()
        sums = {"policy/loss": value.detach(), "policy/approx_kl": (weights * approx_kl(log_ratio, mask=mask)).sum()}
        if clipped is not None:
            sums["policy/clip_fraction"] = (weights * clipped).sum()
        if evaluation.kl is not None:
            sums["policy/kl"] = (weights * torch.where(mask, evaluation.kl.detach(), 0.0)).sum()
        if evaluation.entropy is not None:
            sums["policy/entropy"] = (weights * evaluation.entropy.detach()).sum()
        ratio = torch.where(mask, log_ratio, 0.0).exp()
        return sums, {"policy/ratio_max": (ratio - 1).abs().max()}

    def _clipped(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """1 for each action that is clipped: its gradient is removed (clip, gspo), or its weight is bounded (cispo)."""
        from retouch.core.surrogates import clip_fraction, sequence_log_ratio

        assert self.clip_high is not None
        if self.surrogate == "cispo":
            ratio = log_ratio.masked_fill(~mask, 0.0).exp()
            low = math.inf if self.clip_low is None else self.clip_low
            return (ratio > 1 + self.clip_high) | (ratio < 1 - low)
        assert self.clip_low is not None
        own = sequence_log_ratio(log_ratio, mask) if self.surrogate == "gspo" else log_ratio
        return clip_fraction(own, advantages, low=self.clip_low, high=self.clip_high, mask=mask)

    # Properties for the rest of the run

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.kl_kind is not None else frozenset()

    @property
    def needs_acting_means(self) -> bool:
        return self.ratio_norm

    @property
    def kl_kind(self) -> Literal["k3", "closed", "velocity"] | None:
        return self.kl.kind if isinstance(self.kl, Kl) else None

    @property
    def has_ratio(self) -> bool:
        return self.surrogate != "reinforce"

    @property
    def one_ratio_per_row(self) -> bool:
        return self.surrogate == "gspo"

    @property
    def loss_weights(self) -> Literal["sequence", "token", "dr_grpo"]:
        return self.normalise

    def trained_kinds(self, step: int) -> Sequence[int] | None:
        if isinstance(self.tokens, TokenCycle):
            cycle = ["text"] * self.tokens.text_steps + ["vision"] * self.tokens.vision_steps
            return _KINDS[cycle[step % len(cycle)]]
        return _KINDS[self.tokens]

    # Checks

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        here = context.objective
        if self.kl_kind is not None and (self.kl_kind == "k3") != context.is_autoregressive:
            right = "k3 for tokens" if context.is_autoregressive else "closed or velocity for transitions"
            yield f"{here}.kl.kind: {self.kl_kind} is not for this policy; use {right}"
        if self.ratio_norm and context.is_autoregressive:
            yield f"{here}.ratio_norm: it centres the ratios of transitions, and tokens have none; remove it"
        elif self.ratio_norm and self.surrogate in ("gspo", "cispo"):
            yield f"{here}.ratio_norm: it balances the steps only with surrogate clip; remove it, or use clip"
        if self.step_weights == "noise" and context.is_autoregressive:
            yield f"{here}.step_weights: it weights denoising steps, and tokens have none; remove it"
        elif self.step_weights == "noise" and self.ratio_norm:
            yield f"{here}.step_weights: ratio_norm already gives every step the same scale; remove one of them"
        if self.entropy_bonus > 0 and not context.is_autoregressive:
            yield f"{here}.entropy_bonus: the entropy of a transition does not depend on the policy; remove it"
        yield from self._token_problems(context)
        if not context.is_autoregressive:
            yield from self._transition_problems(context)
        if self.surrogate == "reinforce":
            yield from self._reinforce_problems(context)
        else:
            yield from self._clip_problems(context)
        actions = 0 if context.actions is None else context.actions
        if self.surrogate == "gspo" and context.microbatch < actions:
            split = f"{context.microbatch} splits the {actions} actions of a row"
            yield f"microbatch: {split}, and gspo needs all of them at once for its ratio; use {actions}"
        if self.dual is not None and self.surrogate not in ("clip", "gspo"):
            yield f"{here}.dual: {self.surrogate} does not read it; remove it"

    def _token_problems(self, context: ObjectiveContext) -> Iterator[str]:
        if self.tokens == "all":
            return
        here = f"{context.objective}.tokens"
        if not context.is_autoregressive:
            yield f"{here}: a denoising policy has transitions and no tokens; remove it"
        elif context.token_kinds is not None and "vision" not in context.token_kinds:
            yield f"{here}: {context.model} writes only text; remove it"
        elif context.token_kinds is not None and self.tokens != "vision" and "text" not in context.token_kinds:
            yield (
                f"{here}: without policy.model.think no text is written before the image, so nothing would train; use "
                "think: true, or all"
            )

    def _transition_problems(self, context: ObjectiveContext) -> Iterator[str]:
        here = f"{context.rollout}.transition"
        if not context.stochastic:
            yield f"{here}.kind: ode has no log-probabilities, which a policy gradient needs; use cps or sde"
        elif context.noise_level == 0:
            yield f"{here}.noise_level: 0 explores nothing, so nothing would be learned; 0.7 is usual"

    def _reinforce_problems(self, context: ObjectiveContext) -> Iterator[str]:
        here = context.objective
        if self.clip_low is not None or self.clip_high is not None:
            yield f"{here}.clip_low, {here}.clip_high: reinforce does not clip; remove both"
        if self.ratio_norm:
            yield f"{here}.ratio_norm: reinforce has no ratio; remove it"
        if context.optimizer_steps > 1:
            yield "epochs, minibatches: reinforce allows one optimizer step on a rollout; use 1 and 1, or surrogate clip"

    def _clip_problems(self, context: ObjectiveContext) -> Iterator[str]:
        low, high = self.clip_low, self.clip_high
        upper, both = f"{context.objective}.clip_high", f"{context.objective}.clip_low, {context.objective}.clip_high"
        if high is None or (low is None and self.surrogate != "cispo"):
            needed = f"{upper}: cispo needs it" if self.surrogate == "cispo" else f"{both}: {self.surrogate} needs both"
            yield f"{needed}; {'0.2 is usual' if context.is_autoregressive else '1e-5 is usual with reduction mean, 0.2 with sum'}"
        else:
            try:
                check_clip(context.reduction, low, high)
            except ValueError as error:
                yield f"{upper if low is None else both}: {error}"
        if context.lora_dropout is not None and context.lora_dropout[1] > 0:
            key, dropout = context.lora_dropout
            yield f"{key}: {dropout} makes the ratio differ from 1 before the first update; use 0"

    def _check_bounds(self) -> None:
        low = self.clip_low is not None or self.surrogate in ("cispo", "reinforce")
        if not low or (self.clip_high is None and self.surrogate != "reinforce"):
            bounds = f"clip_low {self.clip_low}, clip_high {self.clip_high}"
            raise ValueError(f"surrogate {self.surrogate!r} with {bounds}: give the missing one")

    def _check_whole_rows(self, actions: int, of: int) -> None:
        if self.surrogate == "gspo" and actions < of:
            raise ValueError(f"gspo needs the ratio of all {of} actions of a row at once; raise microbatch to at least {of}")


def check_clip(reduction: Literal["mean", "sum", "token"], low: float | None, high: float) -> None:
    """Raises ValueError if a clip range does not fit the scale of the log-probabilities; the message says what to do.

    ``reduction``: how a transition's log-probability was reduced over its D elements, or "token". A clip range of 0.2 on the sum
    corresponds to 0.2 / D on the mean, so a range chosen for one reduction clips never or always with the other. ``low``: None if
    the ratio has no lower bound.
    """
    if low is not None and not 0 <= low < 1:
        raise ValueError(f"clip range low {low}: the ratio is kept above 1 - low, so give 0 <= low < 1")
    if not 0 <= high < math.inf:
        raise ValueError(f"clip range high {high}: the ratio is kept below 1 + high, so give a finite high >= 0")
    if reduction not in ("mean", "sum", "token"):
        raise ValueError(f"reduction {reduction!r}: choose 'mean', 'sum' or 'token'")
    bounds = [high] if low is None else [low, high]
    shown = ", ".join(map(str, bounds))
    if reduction == "mean" and max(bounds) > 1e-2:
        raise ValueError(
            f"clip range {shown} on log-probabilities averaged over a transition's elements would never clip; "
            "use 1e-6 to 1e-4, or reduction 'sum'"
        )
    if reduction == "sum" and min(bounds) < 1e-3:
        raise ValueError(
            f"clip range {shown} on log-probabilities summed over a transition's elements would always clip; "
            "use about 0.2, or reduction 'mean'"
        )


def GRPO(*, clip: float, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """Group relative policy optimisation: PPO's clipped ratio on group advantages (DeepSeekMath, arXiv 2402.03300; Flow-GRPO, arXiv
    2505.05470).

    ``clip``: the ratio is clipped to [1 - clip, 1 + clip]; 1e-6 to 1e-4 is usual for denoising policies, whose log-probabilities
    are averaged over a latent, and 0.2 for tokens. ``kl``: weight of the KL to the reference, which is the closed form for
    denoising policies; for tokens give ``kl=Kl(kind="k3", weight=...)``. ``keys``: other keys of ``PolicyGradient``.

    Example::

        >>> retouch.GRPO(clip=1e-4).clip_high
        0.0001
    """
    return PolicyGradient(surrogate="clip", clip_low=clip, clip_high=clip, kl=_kl(kl), **keys)


def GSPO(*, clip: float, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """Group sequence policy optimisation: one ratio per chain or completion (arXiv 2507.18071). Arguments as for ``GRPO``.

    Example::

        >>> retouch.GSPO(clip=3e-4).surrogate
        'gspo'
    """
    return PolicyGradient(surrogate="gspo", clip_low=clip, clip_high=clip, kl=_kl(kl), **keys)


def CISPO(*, clip: float, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """The log-probability is weighted by the clipped ratio (MiniMax-M1, arXiv 2506.13585). The weight is at most 1 + ``clip``.

    Example::

        >>> retouch.CISPO(clip=0.2).clip_high
        0.2
    """
    return PolicyGradient(surrogate="cispo", clip_high=clip, kl=_kl(kl), **keys)


def REINFORCE(*, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """Log-probability times advantage, without a ratio: one optimizer step per rollout (Williams 1992).

    Example::

        >>> retouch.REINFORCE(kl=0.01).kl.weight
        0.01
    """
    return PolicyGradient(surrogate="reinforce", kl=_kl(kl), **keys)


def _kl(kl: float | Kl | NoKl) -> Kl | NoKl:
    if isinstance(kl, Kl | NoKl):
        return kl
    return Kl(kind="closed", weight=float(kl)) if kl else NoKl()
