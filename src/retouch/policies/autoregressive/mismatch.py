"""How far an engine's log-probabilities are from the policy's own, and the weights that correct the difference.

An engine with other kernels, batches or number types samples from a slightly different distribution than the policy. The gradient
stays unbiased if each token's loss is weighted by p_policy / p_engine; the weights are truncated at a cap, which keeps them finite
(``retouch.core.surrogates.importance_weights``; for engines of language models, Yao et al. 2025).
"""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from retouch.policies.engine import EngineFault


def log_prob_difference(
    policy: Float[Tensor, "b t"], engine: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, " n"]:
    """log p_policy - log p_engine of each sampled token, in nats."""
    return (policy - engine)[mask]


def check_mismatch(
    policy: Float[Tensor, "b t"],
    engine: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    limit: float,
    any_rank: Callable[[bool], bool] = bool,
) -> None:
    """Raise EngineFault on all ranks if on any rank the mean absolute difference, in nats per token, is NaN or above ``limit``.

    ``any_rank``: tells whether a flag is true on at least one rank; all ranks must call it.
    """
    difference = log_prob_difference(policy, engine, mask).abs()
    mean = difference.mean().item() if len(difference) else 0.0
    if any_rank(not mean <= limit):
        raise EngineFault(
            f"the engine's log-probabilities are off from the policy's own by {mean:.3g} nats a token on this rank, and the "
            f"recipe allows {limit:g} (rollout.engine.max_mismatch). It may have other weights, another temperature or another "
            "number type than the policy; a vLLM server needs --logprobs-mode processed_logprobs"
        )
