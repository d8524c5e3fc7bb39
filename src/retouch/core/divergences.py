"""How far a policy is from its reference, for use as a penalty. fp32 throughout; each is 0 where the two agree."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retouch.core.rows import Reduction, reduce_rows


def k3(
    log_probs: Float[Tensor, "b t"], reference_log_probs: Float[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b t"]:
    """exp(d) - d - 1 with d = reference - current log-probability: never negative, unbiased for KL(current || reference).

    "k3" of Schulman (Approximating KL divergence, 2020), for tokens drawn from the current policy. Masked actions are 0.
    """
    d = reference_log_probs.float() - log_probs.float()
    if mask is not None:
        d = d.masked_fill(~mask, 0)
    return torch.expm1(d) - d


def gaussian_kl(
    mean: Float[Tensor, "b ..."],
    reference_mean: Float[Tensor, "b ..."],
    step_std: Float[Tensor, " b"],
    *,
    reduction: Reduction,
) -> Float[Tensor, " b"]:
    """KL of two Gaussians of equal spread: (mean - reference_mean)^2 / (2 step_std^2), mean or sum over all but the rows.

    ``step_std`` is the true standard deviation of the transition, so |dt| is in it (Flow-GRPO's code leaves it out, arXiv
    2505.05470). NaN where ``step_std`` is 0: there are no densities to compare.
    """
    distance = reduce_rows((mean.float() - reference_mean.float()).square(), reduction)
    variance = step_std.float().square()
    none = variance == 0
    # NaN is added, not multiplied, so that a row that is masked out afterwards gets gradient 0 and not NaN.
    return distance * (0.5 / variance).masked_fill(none, 0) + variance.new_zeros(variance.shape).masked_fill(none, torch.nan)


def velocity_mse(velocity: Float[Tensor, "b ..."], reference_velocity: Float[Tensor, "b ..."]) -> Float[Tensor, " b"]:
    """Mean squared distance of two velocities over all but the rows: a penalty with the same weight at every sigma.

    Used in place of the KL by DiffusionNFT (arXiv 2509.16117); finite also where a transition has no density.
    """
    return reduce_rows((velocity.float() - reference_velocity.float()).square(), "mean")
