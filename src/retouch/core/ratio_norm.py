"""RatioNorm of GRPO-Guard (arXiv 2510.22319): a log-ratio of transitions with mean 0 and the same spread at every step.

With acting mean m0, new mean m and next = m0 + step_std * noise, the Gaussian log-ratio is

    log_prob - old_log_prob = <noise, m - m0> / step_std - |m - m0|^2 / (2 step_std^2),

whose second term pushes the ratio below 1, so that good actions never meet the clip, and whose spread grows as the noise
shrinks. RatioNorm adds the second term back and multiplies by step_std:

    log_ratio = step_std (log_prob - old_log_prob + |m - m0|^2 / (2 step_std^2)) = <next - m0, m - m0> / step_std.

Here <,> and | |^2 are means or sums over all but the rows. step_std is the true standard deviation of next given x: the published
code's "std_dev_t" times sqrt(-dt), in which that factor must not be applied a second time.
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
    """The normalised log-ratio <next - old_mean, mean - old_mean> / step_std; exactly 0 where the means agree.

    The gradient runs through ``mean`` only. This form needs no log-probabilities: it holds for every kind of transition ("cps"
    included, whose log_prob drops the variance) and loses no digits in a difference of large numbers. NaN where ``step_std`` is 0.
    """
    old_mean, step_std = old_mean.detach().float(), step_std.detach().float()
    none = step_std == 0
    inner = reduce_rows((next.detach().float() - old_mean) * (mean.float() - old_mean), reduction)
    # NaN is added, not multiplied, so that a row that is masked out afterwards gets gradient 0 and not NaN.
    return inner * (1 / step_std).masked_fill(none, 0) + torch.zeros_like(step_std).masked_fill(none, torch.nan)


def gradient_balance(sigma: Float[Tensor, " b"], sigma_next: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """1 / -dt, by which GRPO-Guard multiplies a transition's loss: RatioNorm's gradient is in proportion to -dt at every step."""
    return 1 / (sigma.float() - sigma_next.float())
