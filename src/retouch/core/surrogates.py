"""Policy-gradient surrogates: a loss per action (b, t), to be minimised, from log-ratios or log-probabilities with gradient.

``log_ratio`` is log of new over acting probability; ``low`` and ``high`` are distances from 1, so the ratio is kept within
[1 - low, 1 + high]. ``mask`` is True where an action counts; None means that all do. Elsewhere loss and gradient are exactly 0,
whatever (inf and NaN included) stands there. fp32 throughout. Clipping is done on the log-ratio, before exp, where it
gives the same loss and gradient and cannot overflow.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clipped(
    log_ratio: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    *,
    low: float,
    high: float,
    dual: float | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """PPO's clipped surrogate, max(-A r, -A clamp(r, 1 - low, 1 + high)) (arXiv 1707.06347; unequal bounds: DAPO, 2503.14476).

    ``dual``: a constant c > 1 that bounds the loss of actions with a negative advantage by c |A| (dual clip, arXiv 1912.09729).
    ValueError: a bound out of range.
    """
    below, above = _log_bounds(low, high)
    if dual is not None and not dual > 1:
        raise ValueError(f"dual {dual}: must be above 1, or None")
    ceiling = math.inf if dual is None else math.log(dual)
    advantages = advantages.float()
    worse = advantages < 0
    # The ratio is bounded only on the side to which the advantage pushes it.
    bounded = _masked(log_ratio, mask).clamp(torch.where(worse, below, -math.inf), torch.where(worse, ceiling, above))
    return _masked(-advantages * bounded.exp(), mask)


def cispo(
    log_ratio: Float[Tensor, "b t"],
    log_probs: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    *,
    low: float | None,
    high: float,
    mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """-sg(clamp(r, 1 - low, 1 + high)) A log p (CISPO, arXiv 2506.13585): no action loses its gradient to the clip.

    ``sg`` stops the gradient; ``low`` None leaves the ratio unbounded below, as the paper does. ValueError: a bound out of range.
    """
    below, above = _log_bounds(0.0 if low is None else low, high)
    ratio = _masked(log_ratio, mask).detach().clamp(-math.inf if low is None else below, above).exp()
    return -ratio * advantages.float() * _masked(log_probs, mask)


def reinforce(
    log_probs: Float[Tensor, "b t"], advantages: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b t"]:
    """-A log p, with no ratio and no clip: right for one optimizer step a rollout (REINFORCE; EARL, arXiv 2508.01119)."""
    return -advantages.float() * _masked(log_probs, mask)


def sequence_log_ratio(
    log_ratio: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, gradient: Literal["sequence", "token"] = "sequence"
) -> Float[Tensor, "b t"]:
    """The mean of a row's log-ratios, at each of its actions: GSPO's length-normalised sequence ratio (arXiv 2507.18071).

    ``gradient`` "sequence": each action's value carries the gradient of the mean (GSPO). "token": the same value with, straight
    through, the gradient of that action's own log-ratio (GSPO-token), so that actions of a row may have different advantages;
    where they are equal and weighted equally the two give the same gradient. Masked actions are 0.
    """
    own = _masked(log_ratio, mask)
    mean = own.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    if gradient == "sequence":
        return _masked(mean.expand_as(own), mask)
    if gradient == "token":
        return _masked(mean.detach() + (own - own.detach()), mask)
    raise ValueError(f"gradient {gradient!r}: choose 'sequence' or 'token'")


def clip_fraction(
    log_ratio: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    *,
    low: float,
    high: float,
    mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """1 where ``clipped`` cuts the gradient, else 0: the ratio is out of bounds on the side to which the advantage pushes it."""
    below, above = _log_bounds(low, high)
    own, advantages = _masked(log_ratio.detach(), mask), advantages.float()
    return (((advantages < 0) & (own < below)) | ((advantages > 0) & (own > above))).float()


def approx_kl(log_ratio: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b t"]:
    """Half the squared log-ratio: a diagnostic of how far the policy has moved from the one that acted. Without gradient.

    Its mean over actions estimates their KL divergence to second order ("k2" of Schulman, Approximating KL divergence, 2020).
    """
    return 0.5 * _masked(log_ratio.detach(), mask).square()


def check_clip(reduction: Literal["mean", "sum", "token"], low: float, high: float) -> None:
    """ValueError where a clip range does not belong to the scale of the log-probabilities; says what to do.

    ``reduction``: how a transition's log-probability was reduced over its elements, or "token". With D elements a clip of 0.2 on
    the sum is one of 0.2 / D on the mean, so a range made for the one never or always clips on the other.
    """
    _log_bounds(low, high)
    if reduction == "mean" and max(low, high) > 1e-2:
        raise ValueError(
            f"clip range {low}, {high} on log-probabilities averaged over a transition's elements: it would never clip; "
            "use 1e-6 to 1e-4, or reduction 'sum'"
        )
    if reduction == "sum" and min(low, high) < 1e-3:
        raise ValueError(
            f"clip range {low}, {high} on log-probabilities summed over a transition's elements: it would clip always; "
            "use about 0.2, or reduction 'mean'"
        )
    if reduction not in ("mean", "sum", "token"):
        raise ValueError(f"reduction {reduction!r}: choose 'mean', 'sum' or 'token'")


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    # Filling before exp matters: 0 * inf is NaN, in the loss and in its gradient.
    return x.float() if mask is None else x.float().masked_fill(~mask, 0)


def _log_bounds(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low < 1:
        raise ValueError(f"clip range low {low}: the ratio is kept above 1 - low, so give 0 <= low < 1")
    if not 0 <= high < math.inf:
        raise ValueError(f"clip range high {high}: the ratio is kept below 1 + high, so give a finite high >= 0")
    return math.log1p(-low), math.log1p(high)
