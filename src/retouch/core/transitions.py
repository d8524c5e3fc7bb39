"""One transition of a denoising chain: from x at sigma to the next x at sigma_next, with its log-probability.

Conventions: sigma runs 1 to 0, so dt = sigma_next - sigma < 0; velocity = noise - data; x = (1 - sigma) data + sigma noise.
Everything is cast to fp32 first (bf16 loses the mean). Each row may be at another sigma.

Every kind has a mean that is linear in x and velocity, and one spread a row, ``step_std``: the TRUE standard deviation of next
given x. A factor sqrt(-dt) that other codes keep apart is inside it for every kind.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.rows import Reduction, per_row, reduce_rows

TransitionKind: TypeAlias = Literal["sde", "cps", "dance", "ode"]


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """``next`` without gradient; ``log_prob`` and ``mean`` with it; ``step_std`` the true standard deviation of next given x.

    ``log_prob`` is NaN where ``step_std`` is 0: there is no density. A loss that uses it becomes NaN; one that masks it out (fills
    it with a constant) gets gradient 0 from it.
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
) -> Transition:
    """Roll out with ``noise`` (standard normal), or evaluate with the ``next`` that was reached; the ode takes neither.

    ``x`` and ``velocity`` are (b, ...) with at least two axes; 0 <= sigma_next < sigma <= 1.
    ``sigma_max`` is the schedule's second sigma: the sde puts it in place of sigma 1, where its noise would be infinite.
    ``noise_level`` a is 0 or more (cps: 0 to 1); the ode reads neither of the two.

    - "sde": s = a sqrt(sigma / (1 - sigma)), step_std = s sqrt(-dt) (Flow-GRPO, arXiv 2505.05470);
    - "dance": the same with a constant s = a (DanceGRPO, arXiv 2505.07818);
    - "cps": step_std = sigma_next sin(a pi / 2), which keeps the marginals of the ode (Flow-CPS, arXiv 2509.05952);
    - "ode": the Euler step; step_std 0.

    ``log_prob`` is the Gaussian log-density, mean or sum over all but the rows; for "cps" minus the mean (or summed) squared
    distance to the mean, with variance and constants dropped, as Flow-CPS trains it: not a density, and its ratio's scale differs.
    It is computed on exactly the ``next`` that is returned, and its gradient runs through the mean only. Where step_std is 0 (ode,
    noise level 0, the last cps step) a rollout's next is the mean, and ``log_prob`` is NaN.

    ValueError: an unknown kind, a noise level out of range, or not exactly one of ``noise`` and ``next``.
    """
    _check(kind, noise_level, given=(noise is not None) + (next is not None))
    x, velocity, sigma, sigma_next = x.float(), velocity.float(), sigma.float(), sigma_next.float()
    x_coefficient, v_coefficient, step_std = _coefficients(kind, sigma, sigma_next, noise_level, sigma_max)
    mean = velocity * per_row(v_coefficient, x)
    mean = x + mean if x_coefficient is None else torch.addcmul(mean, x, per_row(x_coefficient, x))
    if noise is not None:
        next = torch.addcmul(mean, noise.float(), per_row(step_std, x))
    if next is None:
        return Transition(mean.detach(), torch.full_like(step_std, torch.nan), mean, step_std)
    next = next.detach().float()
    distance = reduce_rows((next - mean).square(), reduction)
    elements = 1 if reduction == "mean" else x.shape[1:].numel()
    factor, constant = _density(kind, step_std, elements)
    return Transition(next, torch.addcmul(constant, distance, factor), mean, step_std)


def _coefficients(
    kind: TransitionKind, sigma: Tensor, sigma_next: Tensor, noise_level: float, sigma_max: float | Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What x (None: 1) and velocity are multiplied by in the mean, and step_std; each (b,)."""
    if kind == "cps":
        # sqrt(sigma_next^2 - step_std^2) is sigma_next cos(a pi / 2), without the cancellation.
        kept = math.cos(noise_level * math.pi / 2)
        v_coefficient = sigma_next * (sigma + kept * (1 - sigma)) - sigma
        return 1 - (1 - kept) * sigma_next, v_coefficient, sigma_next * math.sin(noise_level * math.pi / 2)
    dt = sigma_next - sigma
    if kind == "ode":
        return None, dt, torch.zeros_like(dt)
    # drift = s^2 dt / (2 sigma), with s^2 = a^2 for dance and a^2 sigma / (1 - sigma) for sde.
    scale = noise_level**2 / 2
    drift = dt * scale / (sigma if kind == "dance" else 1 - torch.where(sigma == 1, sigma_max, sigma))
    return 1 + drift, torch.addcmul(dt, drift, 1 - sigma), (drift * sigma * -2).sqrt()


def _density(kind: TransitionKind, step_std: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """(b,) factor of the squared distance and (b,) constant. Without density the factor is 0 and the constant NaN, so that a
    row that is masked out gets gradient 0 and not 0 * inf."""
    none = step_std == 0
    if kind == "cps":
        return torch.full_like(step_std, -1), torch.zeros_like(step_std).masked_fill(none, torch.nan)
    factor = (-0.5 / step_std.square()).masked_fill(none, 0)
    constant = (step_std.log() + 0.5 * math.log(2 * math.pi)) * -elements
    return factor, constant.masked_fill(none, torch.nan)


def _check(kind: str, noise_level: float, given: int) -> None:
    if kind not in ("sde", "cps", "dance", "ode"):
        raise ValueError(f"transition {kind!r}: choose 'sde', 'cps', 'dance' or 'ode'")
    if given != (kind != "ode"):
        raise ValueError(f"transition {kind!r}: give noise to roll out or next to evaluate, one of them, and neither for 'ode'")
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level {noise_level}: must be 0 or more")
    if kind == "cps" and noise_level > 1:
        raise ValueError(f"noise_level {noise_level} with 'cps': its noise falls again above 1; give 0 to 1, or use 'sde'")
