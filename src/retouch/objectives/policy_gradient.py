"""Policy gradients: the clipped surrogate and its relatives (GRPO, GSPO, CISPO, REINFORCE), with a KL penalty and a value head
(PPO). The policy's ``evaluate`` gives log-ratios, scales and KLs, and ``PolicyGradient.losses`` adds up the whole loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PrivateAttr

from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.objectives.base import Objective, ObjectiveContext, ValueHead
from retouch.protocols import Policy
from retouch.types import Kind, Loss, Minibatch, Needs

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

    _is_usual: bool = PrivateAttr(default=False)  # made of a number: ``for_policy`` chooses the kind


AnyKl: TypeAlias = float | Mapping[str, Any] | Kl | NoKl


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
    surrogate: Literal["clip", "cispo", "reinforce", "gspo", "dppo"] = "clip"
    """``clip``: PPO's clipped ratio (arXiv 1707.06347). ``cispo``: a clipped weight on the log-probability (arXiv 2506.13585).
    ``reinforce``: no ratio. ``gspo``: PPO's clipped ratio, with one ratio for the whole chain or completion (arXiv 2507.18071).
    ``dppo``: the ratio without a clip; an action does not train once its KL from the acting policy has reached ``kl_limit`` and its
    ratio has moved in the direction of its advantage (Flow-DPPO, arXiv 2606.11025; for tokens DPPO, arXiv 2602.04879)."""
    clip_low: Positive | None = None
    """The ratio is clipped below at 1 - clip_low; ``clip`` and ``gspo`` need it, ``cispo`` may have no lower bound."""
    clip_high: Positive | None = None
    """The ratio is clipped above at 1 + clip_high; ``clip``, ``gspo`` and ``cispo`` need it. 1e-6 to 1e-4 is usual with reduction
    ``mean``."""
    kl_limit: Positive | None = Field(default=None, exclude_if=lambda limit: limit is None)
    """``dppo`` needs it: the KL from which on an action can stop training. For a transition it is the KL of the acting step to the
    current one, reduced like its log-probability (1e-6 to 1e-5 is usual with reduction ``mean``); for a token the KL of sampling
    this token or not (0.05 is usual)."""
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
    _value_head: ValueHead | None = PrivateAttr(default=None)

    def build(self, *, entropy: bool = False, value_head: ValueHead | None = None) -> PolicyGradient:
        """Build the objective of a run (see ``Objective.build``). Raises ValueError if a clip bound or ``kl_limit`` is missing."""
        needed = {"reinforce": (), "cispo": ("clip_high",), "dppo": ("kl_limit",)}.get(self.surrogate, ("clip_low", "clip_high"))
        if any(getattr(self, key) is None for key in needed):
            given = ", ".join(f"{key} {getattr(self, key)}" for key in needed)
            raise ValueError(f"surrogate {self.surrogate!r} with {given}: give the missing one")
        objective = self.model_copy()
        objective._entropy, objective._value_head = entropy, value_head
        return objective

    def for_policy(self, *, is_autoregressive: bool) -> PolicyGradient:
        """The objective, with the clip range and the kind of KL that fit the policy, where they were left open."""
        chosen: dict[str, Any] = {}
        if self.surrogate == "clip":
            bounds = (bound for bound in ("clip_low", "clip_high") if getattr(self, bound) is None)
            chosen = dict.fromkeys(bounds, 0.2 if is_autoregressive else 1e-4)
        if isinstance(self.kl, Kl) and self.kl._is_usual:
            chosen["kl"] = Kl(kind="k3" if is_autoregressive else "closed", weight=self.kl.weight)
        return self.model_copy(update=chosen)

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        """Yield the loss of each microbatch (see ``Objective.losses``). Raises ValueError if gspo gets a part of a row."""
        import torch

        from retouch.core import gae, surrogates

        trajectory, low, high = minibatch.trajectory, self.clip_low, self.clip_high
        needs = Needs(
            kl=self.kl_kind,
            entropy=self._entropy or self.entropy_bonus > 0,
            values=self._value_head is not None,
            log_ratio="norm" if self.ratio_norm else "plain",
            step_weights=self.step_weights,
            divergence=self.surrogate == "dppo",
        )
        for part in policy.microbatches(trajectory):
            mask, weights, advantages = (
                each[part.rows, part.actions] for each in (trajectory.mask, minibatch.weights, minibatch.advantages)
            )
            if self.surrogate == "gspo" and mask.shape[1] < (of := trajectory.mask.shape[1]):
                raise ValueError(f"gspo needs the ratio of all {of} actions of a row at once; raise microbatch to at least {of}")

            # The forward pass: log p of the stored actions under the current weights, and log ratio = log p - stored log p.
            now = policy.evaluate(trajectory, part, needs)

            value_loss = None
            if self._value_head is not None:  # PPO's critic; its targets are those of the rollout, in every epoch
                assert now.values is not None
                assert trajectory.values is not None
                assert minibatch.returns is not None
                old, returns = trajectory.values[part.rows, part.actions], minibatch.returns[part.rows, part.actions]
                error = gae.clipped_value_loss(now.values, old, returns, clip=self._value_head.clip, mask=mask)
                value_loss = (weights * error).sum()

            # The surrogate of each action. One ratio of a row (gspo) has the gradient of all actions that it contains, whatever
            # their weights, so actions of weight 0 must not be in it.
            of_ratio = mask & (weights > 0) if self.one_ratio_per_row else mask
            log_ratio = surrogates.sequence_log_ratio(now.log_ratio, of_ratio) if self.surrogate == "gspo" else now.log_ratio
            clipped = None
            if self.surrogate == "reinforce":  # -A log p
                loss = surrogates.reinforce(now.log_probs, advantages, mask=of_ratio)
            elif self.surrogate == "cispo":  # -sg(clip(ratio)) A log p
                assert high is not None
                loss = surrogates.cispo(log_ratio, now.log_probs, advantages, mask=of_ratio, low=low, high=high)
                ratio = log_ratio.detach().masked_fill(~of_ratio, 0.0).exp()
                clipped = (ratio > 1 + high) | (ratio < 1 - (math.inf if low is None else low))
            elif self.surrogate == "dppo":  # -A ratio, or 0 for an action that has moved far enough
                assert self.kl_limit is not None
                assert now.divergence is not None
                loss, clipped = surrogates.dppo(log_ratio, now.divergence, advantages, mask=of_ratio, limit=self.kl_limit)
            else:  # max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
                assert low is not None
                assert high is not None
                loss = surrogates.clipped_surrogate(log_ratio, advantages, mask=of_ratio, low=low, high=high, dual=self.dual)
                clipped = surrogates.clip_fraction(log_ratio, advantages, low=low, high=high, mask=of_ratio)
            if now.scale is not None:  # RatioNorm, noise weights of denoising steps, or the importance weights of an engine
                loss = loss * now.scale

            # where() and not a product: the KL of a masked action may be NaN, and NaN * 0 is NaN.
            if now.kl is not None:
                assert isinstance(self.kl, Kl)
                loss = loss + self.kl.weight * torch.where(mask, now.kl, 0.0)
            if self.entropy_bonus > 0:
                assert now.entropy is not None
                loss = loss - self.entropy_bonus * torch.where(mask, now.entropy, 0.0)
            value = (weights * loss).sum()

            # Metrics are means over actions: their weights sum to 1 over all ranks, unless the advantage weighs rows.
            share, change = weights / minibatch.weight_sum, now.log_ratio.detach()
            # RatioNorm's ratio is not that of the densities, so its square is no KL.
            moved = now.log_probs.detach() - trajectory.log_probs[part.rows, part.actions] if needs.log_ratio == "norm" else change
            sums = {"policy/loss": value.detach(), "policy/approx_kl": (share * surrogates.approx_kl(moved, mask=mask)).sum()}
            if clipped is not None:
                sums["policy/clip_fraction"] = (share * clipped).sum()
            if now.kl is not None:
                sums["policy/kl"] = (share * torch.where(mask, now.kl.detach(), 0.0)).sum()
            if now.entropy is not None:
                sums["policy/entropy"] = (share * torch.where(mask, now.entropy.detach(), 0.0)).sum()
            maxima = {"policy/ratio_max": (torch.where(mask, change, 0.0).exp() - 1).abs().max()}
            if value_loss is not None:
                value, sums["value/loss"] = value + value_loss, value_loss.detach()
            yield Loss(value, sums, maxima)

    # Properties for the rest of the run

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.kl_kind is not None else frozenset()

    @property
    def needs_acting_means(self) -> bool:
        return self.ratio_norm or self.surrogate == "dppo"

    @property
    def kl_kind(self) -> Literal["k3", "closed", "velocity"] | None:
        return self.kl.kind if isinstance(self.kl, Kl) else None

    @property
    def has_ratio(self) -> bool:
        return self.surrogate != "reinforce"

    @property
    def clip_bounds(self) -> tuple[float, ...]:
        return tuple(bound for bound in (self.clip_low, self.clip_high) if bound)

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
        elif self.ratio_norm and self.surrogate in ("gspo", "cispo", "dppo"):
            yield f"{here}.ratio_norm: it balances the steps only with surrogate clip; remove it, or use clip"
        if self.step_weights == "noise" and context.is_autoregressive:
            yield f"{here}.step_weights: it weights denoising steps, and tokens have none; remove it"
        elif self.step_weights == "noise" and self.ratio_norm:
            yield f"{here}.step_weights: ratio_norm already gives every step the same scale; remove one of them"
        if self.entropy_bonus > 0 and not context.is_autoregressive:
            yield f"{here}.entropy_bonus: the entropy of a transition does not depend on the policy; remove it"
        if self.tokens == "all":
            pass
        elif not context.is_autoregressive:
            yield f"{here}.tokens: a denoising policy has transitions and no tokens; remove it"
        elif context.token_kinds is not None and "vision" not in context.token_kinds:
            yield f"{here}.tokens: {context.model} writes only text; remove it"
        elif context.token_kinds is not None and self.tokens != "vision" and "text" not in context.token_kinds:
            yield (
                f"{here}.tokens: without policy.model.think no text is written before the image, so nothing would train; use "
                "think: true, or all"
            )
        if not context.is_autoregressive:
            transition = f"{context.rollout}.transition"
            if not context.stochastic:
                yield f"{transition}.kind: ode has no log-probabilities, which a policy gradient needs; use cps or sde"
            elif context.noise_level == 0:
                yield f"{transition}.noise_level: 0 explores nothing, so nothing would be learned; 0.7 is usual"
        if self.surrogate in ("reinforce", "dppo") and (self.clip_low is not None or self.clip_high is not None):
            yield f"{here}.clip_low, {here}.clip_high: {self.surrogate} does not clip; remove both"
        if self.surrogate == "dppo" or self.kl_limit is not None:
            limit = self.kl_limit
            if self.surrogate == "dppo" and limit is None:
                usual = "0.05 is usual" if context.is_autoregressive else "1e-5 is usual with reduction mean"
                yield f"{here}.kl_limit: dppo needs it; {usual}"
            elif self.surrogate != "dppo":
                yield f"{here}.kl_limit: {self.surrogate} does not read it; remove it"
            elif limit is not None and limit > 1e-2 and context.reduction == "mean":
                never = f"a KL averaged over a transition's elements never reaches {limit}"
                yield f"{here}.kl_limit: {never}; use 1e-6 to 1e-4, or reduction 'sum'"
        if self.surrogate == "reinforce":
            if self.ratio_norm:
                yield f"{here}.ratio_norm: reinforce has no ratio; remove it"
            if context.optimizer_steps > 1:
                yield "epochs, minibatches: reinforce allows one optimizer step on a rollout; use 1 and 1, or surrogate clip"
        elif self.surrogate != "dppo":
            yield from self._clip_problems(context)
        if self.has_ratio and context.lora_dropout is not None and context.lora_dropout[1] > 0:
            key, dropout = context.lora_dropout
            yield f"{key}: {dropout} makes the ratio differ from 1 before the first update; use 0"
        actions = 0 if context.actions is None else context.actions
        if self.surrogate == "gspo" and context.microbatch < actions:
            split = f"{context.microbatch} splits the {actions} actions of a row"
            yield f"microbatch: {split}, and gspo needs all of them at once for its ratio; use {actions}"
        if self.dual is not None and self.surrogate not in ("clip", "gspo"):
            yield f"{here}.dual: {self.surrogate} does not read it; remove it"

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


def GRPO(*, clip: float | None = None, kl: AnyKl = 0.0, **keys: Any) -> PolicyGradient:
    """Group relative policy optimisation: PPO's clipped ratio on group advantages (DeepSeekMath, arXiv 2402.03300; Flow-GRPO, arXiv
    2505.05470).

    ``clip``: the ratio is clipped to [1 - clip, 1 + clip]; 1e-6 to 1e-4 is usual for denoising policies, whose log-probabilities
    are averaged over a latent, and 0.2 for tokens; with None, a ``Trainer`` takes 1e-4 or 0.2. ``kl``: weight of the KL to the
    reference, for which a ``Trainer`` takes the closed form for denoising policies, and k3 for tokens; or a ``Kl`` or its keys,
    ``{"kind": "velocity", "weight": 0.04}``. ``keys``: other keys of ``PolicyGradient``. Raises ValueError for unknown keys.

    Example::

        >>> retouch.GRPO(clip=1e-4).clip_high
        0.0001
    """
    return PolicyGradient(**{"surrogate": "clip", "clip_low": clip, "clip_high": clip, "kl": _kl(kl), **keys})


def GSPO(*, clip: float, kl: AnyKl = 0.0, **keys: Any) -> PolicyGradient:
    """Group sequence policy optimisation: one ratio per chain or completion (arXiv 2507.18071). Arguments as for ``GRPO``.

    Example::

        >>> retouch.GSPO(clip=3e-4).surrogate
        'gspo'
    """
    return PolicyGradient(**{"surrogate": "gspo", "clip_low": clip, "clip_high": clip, "kl": _kl(kl), **keys})


def CISPO(*, clip: float, kl: AnyKl = 0.0, **keys: Any) -> PolicyGradient:
    """The log-probability is weighted by the clipped ratio (MiniMax-M1, arXiv 2506.13585). The weight is at most 1 + ``clip``.

    Example::

        >>> retouch.CISPO(clip=0.2).clip_high
        0.2
    """
    return PolicyGradient(surrogate="cispo", clip_high=clip, kl=_kl(kl), **keys)


def DPPO(*, kl_limit: float, kl: AnyKl = 0.0, **keys: Any) -> PolicyGradient:
    """Divergence proximal policy optimisation: an action stops training once its KL from the acting policy reaches ``kl_limit``
    (Flow-DPPO, arXiv 2606.11025; for tokens arXiv 2602.04879). 1e-6 to 1e-5 is usual for denoising policies, 0.05 for tokens.

    Example::

        >>> retouch.DPPO(kl_limit=1e-5).surrogate
        'dppo'
    """
    return PolicyGradient(surrogate="dppo", kl_limit=kl_limit, kl=_kl(kl), **keys)


def REINFORCE(*, kl: AnyKl = 0.0, **keys: Any) -> PolicyGradient:
    """Log-probability times advantage, without a ratio: one optimizer step per rollout (Williams 1992).

    Example::

        >>> retouch.REINFORCE(kl=0.01).kl.weight
        0.01
    """
    return PolicyGradient(surrogate="reinforce", kl=_kl(kl), **keys)


def _kl(kl: AnyKl) -> Kl | NoKl:
    if isinstance(kl, Mapping) and kl.keys() != {"weight"}:
        return NoKl(**kl) if kl.get("kind") == "none" else Kl(**kl)
    weight = kl["weight"] if isinstance(kl, Mapping) else kl
    if isinstance(weight, Kl | NoKl):
        return weight
    if not weight:
        return NoKl()
    made = Kl(kind="closed", weight=float(weight))
    made._is_usual = True
    return made
