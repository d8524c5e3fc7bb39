"""Divergences of a policy from its reference, used as KL penalties. fp32; each is 0 where the two policies agree."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retouch.core.rows import Reduction, reduce_rows


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
