"""How far an engine's probabilities may be from our own, and what is done about the difference.

An engine that computes in other kernels, batches or number types draws from a slightly other distribution than the one that is
trained. The gradient stays unbiased under weights ours / theirs for each token; cut at a cap they stay finite (truncated importance
sampling, Ionides 2008, as of Yao et al. 2025 for language models).
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


class EngineFault(ValueError):
    """An engine failed, or is further off than allowed; raised on every rank, and nothing was learned from the step."""


def difference(ours: Float[Tensor, "b t"], theirs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, " n"]:
    """log ours - log theirs of each token that was drawn."""
    return (ours - theirs)[mask]


def importance(
    ours: Float[Tensor, "b t"], theirs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, cap: float
) -> Float[Tensor, "b t"]:
    """ours / theirs of each token that was drawn, at most ``cap``; 1 elsewhere."""
    return (ours - theirs).masked_fill(~mask, 0.0).exp().clamp(max=cap)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """``limit``: the mean of \\|log ours - log theirs\\| over the tokens of a rollout, in nats, may be no more. ``cap``: tokens are
    weighted by ours / theirs up to it; None does not weight. ``any_rank``: whether something is so on one rank at least, which all
    of them ask equally often.
    """

    limit: float = 0.1
    cap: float | None = None
    any_rank: Callable[[bool], bool] = bool

    def check(self, ours: Float[Tensor, "b t"], theirs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> None:
        """EngineFault, on all ranks, where the mean on one of them is above the limit, or is no number."""
        off = difference(ours, theirs, mask).abs()
        mean = off.mean().item() if len(off) else 0.0
        if self.any_rank(not mean <= self.limit):
            raise EngineFault(
                f"the engine's log-probabilities are off from the policy's own by {mean:.3g} nats a token on this rank, and the "
                f"recipe allows {self.limit:g} (rollout.engine.max_mismatch). It may have other weights, another temperature or "
                "another number type than the policy; a server of vLLM needs --logprobs-mode processed_logprobs"
            )
