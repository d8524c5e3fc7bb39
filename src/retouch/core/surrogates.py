"""Policy-gradient surrogates: a loss per action (b, t), to be minimised, from log-ratios or log-probabilities. fp32.

``log_ratio`` is log(current probability / stored probability), the stored one that of the rollout (or, for stale samples, of the
weights at the start of the step). ``low`` and ``high`` are distances from 1: the ratio is
clipped to [1 - low, 1 + high]. ``mask`` is True for the actions that train; None means all of them. Where it is False, loss and
gradient are exactly 0, even if the inputs there are inf or NaN. Clipping is applied to the log-ratio, before exp: loss and
gradient are the same as when the ratio is clipped, and nothing overflows.
"""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retouch.core.transitions import Reduction, reduce_rows


def clipped_surrogate(
    log_ratio: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    *,
    low: float,
    high: float,
    dual: float | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """max(-A r, -A clamp(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7; unequal bounds: DAPO, arXiv 2503.14476).

    ``dual``: a constant c > 1 that bounds the loss of actions with a negative advantage by c |A| (dual-clip PPO, arXiv
    1912.09729). Raises ValueError if a bound is out of range.

    Example::

        >>> log_ratio = torch.tensor([[0.0, 0.5]])
        >>> retouch.core.clipped_surrogate(log_ratio, torch.ones(1, 2), low=0.2, high=0.2)
        tensor([[-1.0000, -1.2000]])
    """
    log_low, log_high = _log_bounds(low, high)
    if dual is not None and not dual > 1:
        raise ValueError(f"dual {dual}: must be above 1, or None")
    ceiling = math.inf if dual is None else math.log(dual)
    advantages = advantages.float()
    negative = advantages < 0
    # The ratio is bounded only on the side towards which the advantage pushes it.
    bounded = _masked(log_ratio, mask).clamp(torch.where(negative, log_low, -math.inf), torch.where(negative, ceiling, log_high))
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
    """-sg(clamp(r, 1 - low, 1 + high)) A log p, with sg the stop-gradient (CISPO, MiniMax-M1, arXiv 2506.13585).

    Clipping does not remove the gradient of any action. ``low`` None puts no lower bound on the ratio, as in the paper. Raises
    ValueError if a bound is out of range.

    Example::

        >>> retouch.core.cispo(torch.zeros(1, 1), torch.full((1, 1), -2.0), torch.ones(1, 1), low=None, high=0.2)
        tensor([[2.]])
    """
    log_low, log_high = _log_bounds(0.0 if low is None else low, high)
    ratio = _masked(log_ratio, mask).detach().clamp(-math.inf if low is None else log_low, log_high).exp()
    return -ratio * advantages.float() * _masked(log_probs, mask)


def dppo(
    log_ratio: Float[Tensor, "b t"],
    divergence: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    *,
    limit: float,
    mask: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], Bool[Tensor, "b t"]]:
    """-A r, and exactly 0 for the actions that are left out; and which ones these are (Flow-DPPO, arXiv 2606.11025).

    An action is left out if its ``divergence``, the KL of the acting policy to the current one (at least 0, in nats), is at or
    above ``limit`` and (r - 1) A > 0. An action whose ratio has moved against its advantage always trains.

    Example::

        >>> log_ratio, divergence = torch.tensor([[0.0, 0.5]]), torch.tensor([[0.0, 0.1]])
        >>> retouch.core.dppo(log_ratio, divergence, torch.ones(1, 2), limit=0.05)
        (tensor([[-1.,  0.]]), tensor([[False,  True]]))
    """
    moved = _masked(log_ratio.detach(), mask) * advantages.float() > 0
    left_out = moved & (_masked(divergence.detach(), mask) >= limit)
    trains = ~left_out if mask is None else mask & ~left_out
    return _masked(-advantages.float() * _masked(log_ratio, trains).exp(), trains), left_out


def reinforce(
    log_probs: Float[Tensor, "b t"], advantages: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b t"]:
    """-A log p, without ratio or clipping (REINFORCE, Williams 1992; EARL, arXiv 2508.01119).

    Unbiased only if there is one optimizer step per rollout.

    Example::

        >>> retouch.core.reinforce(torch.tensor([[-2.0]]), torch.tensor([[0.5]]))
        tensor([[1.]])
    """
    return -advantages.float() * _masked(log_probs, mask)


def importance_weights(
    current: Float[Tensor, "b t"], acting: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, cap: float
) -> Float[Tensor, "b t"]:
    """The probability of each action under the current policy, divided by its probability under the acting policy, at most ``cap``;
    1 where ``mask`` is False. ``current`` and ``acting`` are log-probabilities.

    With these weights, a mean over actions that the acting policy sampled estimates the mean over actions of the current policy.
    The cap keeps the variance finite, but gives too little weight to actions that have become much more likely. Source: truncated
    importance sampling (Ionides 2008), as TRL and verl apply it to a rollout engine with other numerics than the policy.

    Example::

        >>> current, acting = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -3.0, -9.0]])
        >>> retouch.core.importance_weights(current, acting, torch.tensor([[True, True, False]]), cap=2.0)
        tensor([[1., 2., 1.]])
    """
    return (current - acting).masked_fill(~mask, 0.0).exp().clamp(max=cap)


def sequence_log_ratio(
    log_ratio: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, gradient: Literal["sequence", "token"] = "sequence"
) -> Float[Tensor, "b t"]:
    """The mean of a row's log-ratios, repeated at each of its actions: the length-normalised sequence ratio of GSPO.

    (arXiv 2507.18071, eq. 7.) ``gradient`` "sequence": every action carries the gradient of the mean (GSPO). "token": the same
    value, but with the gradient of the action's own log-ratio (GSPO-token), so that the actions of a row may have different
    advantages. If advantages and weights are equal within a row, both give the same gradient. Masked actions are 0.

    Raises ValueError if ``gradient`` is neither of the two.

    Example::

        >>> retouch.core.sequence_log_ratio(torch.tensor([[0.1, 0.3]]), torch.ones(1, 2, dtype=torch.bool))
        tensor([[0.2000, 0.2000]])
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
    """1 where ``clipped_surrogate`` without ``dual`` removes the gradient, else 0, as (b, t).

    Its weighted mean is the clip fraction.

    The gradient is removed where the ratio is outside the bound towards which the advantage pushes it: above 1 + high for a
    positive advantage, below 1 - low for a negative one.

    Source: PPO (arXiv 1707.06347, equation 7).

    Example::

        >>> retouch.core.clip_fraction(torch.tensor([[0.0, 0.5]]), torch.ones(1, 2), low=0.2, high=0.2)
        tensor([[0., 1.]])
    """
    log_low, log_high = _log_bounds(low, high)
    log_ratio, advantages = _masked(log_ratio.detach(), mask), advantages.float()
    return (((advantages < 0) & (log_ratio < log_low)) | ((advantages > 0) & (log_ratio > log_high))).float()


def approx_kl(log_ratio: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b t"]:
    """Half the squared log-ratio, (b, t), without gradient: how far the policy has moved since the rollout.

    The mean over actions estimates the KL divergence to second order ("k2" of Schulman, Approximating KL Divergence, 2020).

    Example::

        >>> retouch.core.approx_kl(torch.tensor([[0.0, 2.0]]))
        tensor([[0., 2.]])
    """
    return 0.5 * _masked(log_ratio.detach(), mask).square()


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    # Fill before exp: 0 * inf would be NaN, in the loss and in its gradient.
    return x.float() if mask is None else x.float().masked_fill(~mask, 0)


def _log_bounds(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low < 1:
        raise ValueError(f"clip range low {low}: the ratio is clipped below at 1 - low, so give 0 <= low < 1")
    if not 0 <= high < math.inf:
        raise ValueError(f"clip range high {high}: the ratio is clipped above at 1 + high, so give a finite high >= 0")
    return math.log1p(-low), math.log1p(high)


def k3(
    log_probs: Float[Tensor, "b t"], reference_log_probs: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b t"]:
    """exp(d) - d - 1 with d = reference - current log-probability (b, t), in nats per action.

    The "k3" estimator of Schulman (Approximating KL Divergence, 2020), as GRPO uses it (arXiv 2402.03300, eq. 4): never negative,
    and unbiased for KL(current || reference) if the actions were sampled from the current policy. Returns 0 for masked actions.
    """
    d = reference_log_probs.float() - log_probs.float()
    if mask is not None:
        d = d.masked_fill(~mask, 0)
    return torch.expm1(d) - d


def bernoulli_kl(
    acting: Float[Tensor, "b t"], current: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b t"]:
    """p log(p / q) + (1 - p) log((1 - p) / (1 - q)), in nats, without gradient: the KL of sampling this token or another one.

    ``acting`` log p and ``current`` log q are log-probabilities, (b, t). Returns 0 for masked actions.

    A lower bound of the KL over all tokens, which needs no other logits. Source: DPPO (arXiv 2602.04879).
    """
    log_p, log_q = (_masked(each.detach(), mask) for each in (acting, current))
    other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)
    return log_p.exp() * (log_p - log_q) + torch.xlogy(other_p, other_p) - torch.xlogy(other_p, other_q)


def gaussian_kl(
    mean: Float[Tensor, "b ..."],
    reference_mean: Float[Tensor, "b ..."],
    step_std: Float[Tensor, " b"],
    *,
    reduction: Reduction,
) -> Float[Tensor, " b"]:
    """KL of two Gaussians with the same standard deviation: (mean - reference_mean)^2 / (2 step_std^2), (b,), in nats.

    ``reduction``: mean or sum over all axes except rows. ``step_std`` is the true standard deviation of the transition, which
    contains the factor sqrt(-dt): this is the KL of Flow-GRPO's paper (arXiv 2505.05470), whose published code omits that factor.
    NaN if ``step_std`` is 0, because a deterministic transition has no density.
    """
    distance = reduce_rows((mean.float() - reference_mean.float()).square(), reduction)
    variance = step_std.float().square()
    none = variance == 0
    # Add NaN instead of multiplying by it: a row that is masked out later then gets gradient 0, not NaN.
    return distance * (0.5 / variance).masked_fill(none, 0) + variance.new_zeros(variance.shape).masked_fill(none, torch.nan)


def velocity_mse(velocity: Float[Tensor, "b ..."], reference_velocity: Float[Tensor, "b ..."]) -> Float[Tensor, " b"]:
    """Mean squared difference of two velocities over all axes except rows: (b,), with the same weight at every sigma.

    The penalty that DiffusionNFT (arXiv 2509.16117) uses in place of the KL. It is finite even where a transition has no density.
    """
    return reduce_rows((velocity.float() - reference_velocity.float()).square(), "mean")


Normalise: TypeAlias = Literal["token", "sequence", "dr_grpo"]


def loss_weights(
    mask: Bool[Tensor, "b t"],
    valid: Bool[Tensor, " b"],
    *,
    normalise: Normalise,
    max_length: int | None = None,
    over_ranks: Callable[[Tensor], Tensor] = lambda count: count,
) -> Float[Tensor, "b t"]:
    """The weight of each action, such that the loss of a minibatch is the plain sum of weight times loss. 0 for invalid rows and
    masked actions.

    - "token": every action has the same weight (DAPO, arXiv 2503.14476);
    - "sequence": every row with an action has the same weight, divided equally among its actions (GRPO, arXiv 2402.03300);
    - "dr_grpo": every action has weight 1 / (valid rows * ``max_length``) (Dr. GRPO, arXiv 2503.20783).

    With the first two, the weights of all ranks sum to 1, or are all 0. ``mask``: (b, t), True for the actions that train.
    ``valid``: (b,), False for rows without a reward. ``max_length``: the largest possible number of actions of a row.
    ``over_ranks``: the sum of a scalar over all ranks; by default there is one rank. Raises ValueError if "dr_grpo" has no positive
    ``max_length``, if another mode has one, or if the mode is unknown.
    """
    if normalise not in ("token", "sequence", "dr_grpo"):
        raise ValueError(f"normalise {normalise!r}: choose 'token', 'sequence' or 'dr_grpo'")
    if (normalise == "dr_grpo") != (max_length is not None):
        raise ValueError(f"normalise {normalise!r} with max_length {max_length}: 'dr_grpo' needs max_length, and only it takes one")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length {max_length}: give at least 1 action")
    weights = (mask & valid[:, None]).float()
    if normalise == "token":
        count = weights.sum()
    elif normalise == "sequence":
        count = weights.any(1).float().sum()  # a valid row without an action must not dilute the mean
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    else:
        assert max_length is not None
        count = valid.float().sum() * max_length
    total = over_ranks(count)
    return weights / total.masked_fill(total == 0, 1)
