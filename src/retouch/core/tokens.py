"""The distribution from which a token is sampled: allowed ids, temperature, top-k and top-p.

Logits are (n, v), one row per token position, in fp32; an id that cannot be sampled has the logit -inf. The operations have the
order of transformers' logits warpers: temperature, then top-k, then top-p. The ids that top-k and top-p keep are stored as (n, w),
padded with -1. A later policy is evaluated on the same ids, because a ratio of probabilities over two different sets of ids is
meaningless (DeepSeek-V3.2, "keep sampling mask", arXiv 2512.02556).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def warp_logits(logits: Float[Tensor, "n v"], allowed: Bool[Tensor, "#n v"], *, temperature: float) -> Float[Tensor, "n v"]:
    """``logits / temperature``, and -inf where an id is not allowed. ``temperature`` is above 0.

    Source: transformers' TemperatureLogitsWarper; the mask restricts the distribution before normalisation, as in PPO with
    invalid-action masking (Huang & Ontañón 2020, arXiv 2006.14171).
    """
    return (logits.float() / temperature).masked_fill(~allowed, -torch.inf)


def top_k_top_p_mask(logits: Float[Tensor, "n v"], *, top_k: int | None = None, top_p: float | None = None) -> Bool[Tensor, "n v"]:
    """True for the ids that remain after top-k and then top-p; all ids with a finite logit if both are None.

    top-k keeps the k most likely ids and every id tied with the last of them. top-p keeps the smallest set of most likely ids
    whose probabilities sum to at least ``top_p``, 0 to 1 (nucleus sampling, Holtzman et al., arXiv 1904.09751).
    """
    keep = logits > -torch.inf
    if top_k is not None and top_k < logits.shape[-1]:
        keep &= logits >= logits.topk(top_k, dim=-1).values[..., -1:]
    if top_p is not None and top_p < 1:
        sorted_logits, order = logits.masked_fill(~keep, -torch.inf).sort(dim=-1, descending=True)
        probs = sorted_logits.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= top_p
        keep &= ~torch.zeros_like(keep).scatter(-1, order, beyond)
    return keep


def mask_to_ids(mask: Bool[Tensor, "n v"]) -> Int[Tensor, "n w"]:
    """The ids that are True in each row, in ascending order, padded with -1 to the longest row."""
    counts = mask.sum(-1)
    width = int(counts.max())
    ids = mask.new_full((len(mask), width), -1, dtype=torch.int32)
    ids[torch.arange(width, device=mask.device) < counts[:, None]] = mask.nonzero()[:, 1].int()
    return ids


def gather_logits(logits: Float[Tensor, "n v"], ids: Int[Tensor, "n w"]) -> Float[Tensor, "n w"]:
    """The logits of the given ids of each row; -inf where the id is -1."""
    return logits.gather(-1, ids.clamp(min=0).long()).masked_fill(ids < 0, -torch.inf)


def sample_tokens(logits: Float[Tensor, "n v"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Inverse-transform sampling: for each row the first id whose cumulative probability is above ``uniform``, in [0, 1).

    Cumulates in fp64, so that an id of probability 0 is never sampled and the tail of a large vocabulary is not lost.

    Source: the inversion method (Devroye 1986, section II.2).
    """
    device = torch.device("cpu") if logits.device.type == "mps" else logits.device
    cumulative = logits.detach().to(device).double().softmax(-1).cumsum(-1)
    ids = torch.searchsorted(cumulative, uniform.to(device, torch.float64)[:, None] * cumulative[:, -1:], right=True)
    return ids[:, 0].to(logits.device)


def log_prob(
    logits: Float[Tensor, "n v"], ids: Int[Tensor, " n"], *, support: Int[Tensor, "n w"] | None = None
) -> Float[Tensor, " n"]:
    """The log-probability of ``ids`` in nats, (n,): a log-softmax over all ids, or over the ids in ``support`` only."""
    chosen = logits.gather(-1, ids[:, None]).squeeze(-1)
    return chosen - (logits if support is None else gather_logits(logits, support)).logsumexp(-1)


def entropy(logits: Float[Tensor, "n v"], *, support: Int[Tensor, "n w"] | None = None) -> Float[Tensor, " n"]:
    """The entropy -sum p log p in nats, (n,), over all ids, or over the ids in ``support`` only."""
    chosen = logits if support is None else gather_logits(logits, support)
    # Replace -inf before the product: 0 * -inf would be NaN, in the gradient too.
    return chosen.logsumexp(-1) - (chosen.softmax(-1) * chosen.masked_fill(chosen == -torch.inf, 0.0)).sum(-1)
