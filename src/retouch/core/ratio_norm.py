"""RatioNorm of GRPO-Guard (arXiv 2510.22319): a log-ratio of transitions with mean 0 and the same variance at every step.

With m0 the mean under the policy that sampled the rollout, m the mean under the current policy, and next = m0 + step_std * noise,
the Gaussian log-ratio is

    log_prob - old_log_prob = <noise, m - m0> / step_std - |m - m0|^2 / (2 step_std^2).

The second term shifts the ratio below 1, so that actions with a positive advantage are never clipped, and the variance grows
as the noise shrinks. RatioNorm adds the second term back and multiplies by step_std:

    log_ratio = step_std (log_prob - old_log_prob + |m - m0|^2 / (2 step_std^2)) = <next - m0, m - m0> / step_std.

Here <,> and | |^2 are means or sums over all axes except rows. step_std is the true standard deviation of next given x. It
equals "std_dev_t" of the published code times sqrt(-dt), so that factor must not be applied a second time.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.rows import Reduction, reduce_rows


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

    Source: GRPO-Guard (arXiv 2510.22319).
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
