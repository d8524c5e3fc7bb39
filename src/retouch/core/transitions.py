"""One transition of a denoising chain: from x at sigma to the next x at sigma_next, with its log-probability.

Conventions: sigma runs from 1 to 0, so dt = sigma_next - sigma < 0; velocity = noise - data; x = (1 - sigma) data + sigma noise.
All inputs are cast to fp32 first (the mean overflows in bf16). Rows may have different sigmas.

Every kind is a Gaussian whose mean is linear in x and velocity, with one standard deviation per row, ``step_std``. This is the
TRUE standard deviation of next given x: for every kind it includes the factor sqrt(-dt) that other implementations keep apart.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Reduction: TypeAlias = Literal["mean", "sum"]


def reduce_rows(x: Float[Tensor, "b ..."], reduction: Reduction) -> Float[Tensor, " b"]:
    """Mean or sum over every axis except the first: (b, ...) with at least two axes to (b,)."""
    flat = x.flatten(1)
    if reduction == "mean":
        return flat.mean(1)
    if reduction == "sum":
        return flat.sum(1)
    raise ValueError(f"reduction {reduction!r}: choose 'mean' or 'sum'")


def append_dims(column: Float[Tensor, " b"], like: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Reshape (b,) to (b, 1, ..., 1) with as many axes as ``like``, so that it broadcasts over rows."""
    return column.view(-1, *(1,) * (like.ndim - 1))


TransitionKind: TypeAlias = Literal["sde", "cps", "dance", "ode"]


@dataclass(frozen=True, slots=True, eq=False)
class TransitionResult:
    """The result of one transition. ``log_prob`` and ``mean`` carry a gradient, ``next`` does not.

    ``step_std`` is the true standard deviation of next given x. Where it is 0 there is no density and ``log_prob`` is NaN: a loss
    that uses it becomes NaN, and a loss that fills it with a constant gets gradient 0 from it.
    """

    next: Float[Tensor, "b ..."]
    log_prob: Float[Tensor, " b"]
    mean: Float[Tensor, "b ..."]
    step_std: Float[Tensor, " b"]


def transition(
    kind: TransitionKind,
    x: Float[Tensor, "b ..."],
    velocity: Float[Tensor, "b ..."],
    sigma: Float[Tensor, " b"],
    sigma_next: Float[Tensor, " b"],
    *,
    noise_level: float,
    sigma_max: float | Float[Tensor, ""] | Float[Tensor, " b"],
    reduction: Reduction,
    noise: Float[Tensor, "b ..."] | None = None,
    next: Float[Tensor, "b ..."] | None = None,
) -> TransitionResult:
    """Sample the next x from ``noise`` (standard normal), or evaluate a ``next`` that was reached; "ode" takes neither.

    ``x`` and ``velocity`` are (b, ...) with at least two axes; 0 <= sigma_next < sigma <= 1. ``noise_level`` (a below) is at least
    0, and at most 1 for "cps". "sde" uses ``sigma_max``, the schedule's second sigma, in place of sigma 1, where its noise would be
    infinite. "ode" reads neither ``noise_level`` nor ``sigma_max``.

    - "sde": Euler-Maruyama step with s = a sqrt(sigma / (1 - sigma)), step_std = s sqrt(-dt) (Flow-GRPO, arXiv 2505.05470, eq. 9);
    - "dance": the same with a constant s = a (DanceGRPO, arXiv 2505.07818);
    - "cps": step_std = sigma_next sin(a pi / 2), which preserves the marginals of the ODE (Flow-CPS, arXiv 2509.05952);
    - "ode": the Euler step, with step_std 0.

    ``log_prob`` (b,) is the Gaussian log-density in nats, with the mean or sum (``reduction``) over all axes except rows. For
    "cps" it is minus the mean (or summed) squared distance to the mean, without variance and constants, as Flow-CPS trains it:
    this is not a density, and its ratio has another scale. ``log_prob`` is computed on exactly the ``next`` that is returned, and
    its gradient flows through the mean only. Where step_std is 0 ("ode", noise level 0, the last "cps" step), the sampled next is
    the mean and ``log_prob`` is NaN.

    Raises ValueError if the kind is unknown, the noise level is out of range, or ``noise`` and ``next`` are both or neither given.
    """
    if kind not in ("sde", "cps", "dance", "ode"):
        raise ValueError(f"transition {kind!r}: choose 'sde', 'cps', 'dance' or 'ode'")
    if (noise is not None) + (next is not None) != (kind != "ode"):
        raise ValueError(f"transition {kind!r}: give either noise (to sample) or next (to evaluate), and neither for 'ode'")
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level {noise_level}: must be 0 or more")
    if kind == "cps" and noise_level > 1:
        raise ValueError(f"noise_level {noise_level} with 'cps': above 1 its noise decreases again; give 0 to 1, or use 'sde'")
    sigma, sigma_next = sigma.float(), sigma_next.float()
    dt = sigma_next - sigma
    x_coefficient: Tensor | None = None
    if kind == "cps":
        # sigma_next cos(a pi / 2) is sqrt(sigma_next^2 - step_std^2) without the cancellation.
        cosine = math.cos(noise_level * math.pi / 2)
        x_coefficient = 1 - (1 - cosine) * sigma_next
        v_coefficient = sigma_next * (sigma + cosine * (1 - sigma)) - sigma
        step_std = sigma_next * math.sin(noise_level * math.pi / 2)
    elif kind == "ode":
        v_coefficient, step_std = dt, torch.zeros_like(dt)
    else:
        # drift = s^2 dt / (2 sigma), with s^2 = a^2 for dance and a^2 sigma / (1 - sigma) for sde.
        scale = noise_level**2 / 2
        drift = dt * scale / (sigma if kind == "dance" else 1 - torch.where(sigma == 1, sigma_max, sigma))
        x_coefficient = 1 + drift
        v_coefficient, step_std = torch.addcmul(dt, drift, 1 - sigma), (drift * sigma * -2).sqrt()
    coefficients = x_coefficient, v_coefficient, step_std
    return gaussian_step(x, velocity, *coefficients, with_variance=kind != "cps", reduction=reduction, noise=noise, next=next)


def gaussian_step(
    x: Float[Tensor, "b ..."],
    velocity: Float[Tensor, "b ..."],
    x_coefficient: Float[Tensor, " b"] | None,
    v_coefficient: Float[Tensor, " b"],
    step_std: Float[Tensor, " b"],
    *,
    reduction: Reduction,
    with_variance: bool = True,
    noise: Float[Tensor, "b ..."] | None = None,
    next: Float[Tensor, "b ..."] | None = None,
) -> TransitionResult:
    """A Gaussian step with mean ``x_coefficient * x + v_coefficient * velocity`` and standard deviation ``step_std`` per row.

    All kinds of transitions are built on it, and a transition of your own can be too. ``x_coefficient`` None means 1. Give
    ``noise`` to sample, ``next`` to evaluate, neither for a deterministic step. ``with_variance=False`` drops the variance and the
    constants from the log-probability, as Flow-CPS does. Everything is computed in fp32.

    Source: the common form of the steps of Flow-GRPO (arXiv 2505.05470), Flow-CPS (arXiv 2509.05952) and DanceGRPO (arXiv
    2505.07818).
    """
    x, velocity = x.float(), velocity.float()
    mean = velocity * append_dims(v_coefficient, x)
    mean = x + mean if x_coefficient is None else torch.addcmul(mean, x, append_dims(x_coefficient, x))
    if noise is not None:
        next = torch.addcmul(mean, noise.float(), append_dims(step_std, x))
    if next is None:
        return TransitionResult(mean.detach(), torch.full_like(step_std, torch.nan), mean, step_std)
    next = next.detach().float()
    distance = reduce_rows((next - mean).square(), reduction)
    elements = 1 if reduction == "mean" else x.shape[1:].numel()
    # Where there is no density, the factor is 0 and the constant NaN, so that a masked row gets gradient 0 and not 0 * inf.
    none = step_std == 0
    if with_variance:
        factor = (-0.5 / step_std.square()).masked_fill(none, 0)
        constant = (step_std.log() + 0.5 * math.log(2 * math.pi)) * -elements
    else:
        factor, constant = torch.full_like(step_std, -1), torch.zeros_like(step_std)
    constant = constant.masked_fill(none, torch.nan)
    return TransitionResult(next, torch.addcmul(constant, distance, factor), mean, step_std)


def ratio_norm(
    next: Float[Tensor, "b ..."],
    mean: Float[Tensor, "b ..."],
    old_mean: Float[Tensor, "b ..."],
    *,
    step_std: Float[Tensor, " b"],
    reduction: Reduction,
) -> Float[Tensor, " b"]:
    """The normalised log-ratio <next - old_mean, mean - old_mean> / step_std, as (b,); exactly 0 where the means agree.

    Only ``mean`` receives a gradient. This form needs no log-probabilities. It is therefore valid for every kind of transition
    (including "cps", whose log_prob drops the variance) and does not subtract large numbers. NaN if ``step_std`` is 0.

    The Gaussian log-ratio is <noise, mean - old_mean> / step_std - |mean - old_mean|^2 / (2 step_std^2). Its second term shifts the
    ratio below 1, so that actions with a positive advantage are never clipped, and its variance grows as the noise shrinks.
    RatioNorm (GRPO-Guard, arXiv 2510.22319) adds the second term back and multiplies by ``step_std``, the true standard
    deviation. That is "std_dev_t" of the published code times sqrt(-dt), a factor that must not be applied a second time.
    """
    old_mean, step_std = old_mean.detach().float(), step_std.detach().float()
    none = step_std == 0
    inner = reduce_rows((next.detach().float() - old_mean) * (mean.float() - old_mean), reduction)
    # Add NaN instead of multiplying by it: a row that is masked out later then gets gradient 0, not NaN.
    return inner * (1 / step_std).masked_fill(none, 0) + torch.zeros_like(step_std).masked_fill(none, torch.nan)


def gradient_balance(sigma: Float[Tensor, " b"], sigma_next: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """1 / (sigma - sigma_next), (b,): GRPO-Guard's factor on a transition's loss (arXiv 2510.22319).

    With the transition "sde", the gradient of RatioNorm in the velocity is proportional to -dt, so this factor gives every step of
    the chain the same gradient scale. With other transitions the scales still differ.
    """
    return 1 / (sigma.float() - sigma_next.float())
