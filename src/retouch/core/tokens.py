"""The distribution that a token is drawn from: logits that are restricted, divided by the temperature, and cut to the likeliest.

Logits are (n, v), one row a place, fp32; an id that cannot be drawn has the logit -inf. The order is that of transformers'
warpers: temperature, then top-k, then top-p. What top-k and top-p kept is remembered as ids (n, w), filled up with -1: a policy
that has moved is compared on the same ids, since on another set a ratio of probabilities means nothing (DeepSeek-V3.2, arXiv
2512.02556).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def scaled(logits: Float[Tensor, "n v"], allowed: Bool[Tensor, "#n v"], *, temperature: float) -> Float[Tensor, "n v"]:
    """Logits over ``temperature`` (above 0), and -inf where an id is not allowed."""
    return (logits.float() / temperature).masked_fill(~allowed, -torch.inf)


def kept(logits: Float[Tensor, "n v"], *, top_k: int | None = None, top_p: float | None = None) -> Bool[Tensor, "n v"]:
    """The ids that top-k and then top-p leave; all that can be drawn where both are None.

    top-k: the k likeliest, and all that are as likely as the last of them. top-p: the fewest of the likeliest that together have
    a probability of at least top_p (Holtzman et al., arXiv 1904.09751).
    """
    stays = logits > -torch.inf
    if top_k is not None and top_k < logits.shape[-1]:
        stays &= logits >= logits.topk(top_k, dim=-1).values[..., -1:]
    if top_p is not None and top_p < 1:
        falling, order = logits.masked_fill(~stays, -torch.inf).sort(dim=-1, descending=True)
        chances = falling.softmax(-1)
        enough = chances.cumsum(-1) - chances >= top_p
        stays &= ~torch.zeros_like(stays).scatter(-1, order, enough)
    return stays


def kept_ids(stays: Bool[Tensor, "n v"]) -> Int[Tensor, "n w"]:
    """The ids that are True in each row, rising, filled up with -1."""
    counts = stays.sum(-1)
    width = int(counts.max())
    ids = stays.new_full((len(stays), width), -1, dtype=torch.int32)
    ids[torch.arange(width, device=stays.device) < counts[:, None]] = stays.nonzero()[:, 1].int()
    return ids


def on_ids(logits: Float[Tensor, "n v"], ids: Int[Tensor, "n w"]) -> Float[Tensor, "n w"]:
    """The logits of the given ids of each row; -inf where there is none (-1)."""
    return logits.gather(-1, ids.clamp(min=0).long()).masked_fill(ids < 0, -torch.inf)


def draw(logits: Float[Tensor, "n v"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """An id for each row: the first whose cumulated probability is above ``uniform``, which lies in [0, 1).

    Cumulated in fp64, so that no id of probability 0 is ever drawn and the tail of a large vocabulary is not lost.
    """
    device = torch.device("cpu") if logits.device.type == "mps" else logits.device
    chances = logits.detach().to(device).double().softmax(-1).cumsum(-1)
    places = torch.searchsorted(chances, uniform.to(device, torch.float64)[:, None] * chances[:, -1:], right=True)
    return places[:, 0].to(logits.device)


def log_prob(
    logits: Float[Tensor, "n v"], ids: Int[Tensor, " n"], *, support: Int[Tensor, "n w"] | None = None
) -> Float[Tensor, " n"]:
    """log of the probability of ``ids``, among all that can be drawn, or among ``support`` alone."""
    chosen = logits.gather(-1, ids[:, None]).squeeze(-1)
    return chosen - (logits if support is None else on_ids(logits, support)).logsumexp(-1)


def entropy(logits: Float[Tensor, "n v"], *, support: Int[Tensor, "n w"] | None = None) -> Float[Tensor, " n"]:
    """-sum p log p in nats over all that can be drawn, or over ``support`` alone."""
    among = logits if support is None else on_ids(logits, support)
    # 0 * -inf is NaN, in the gradient too: what cannot be drawn is taken out before the product.
    return among.logsumexp(-1) - (among.softmax(-1) * among.masked_fill(among == -torch.inf, 0.0)).sum(-1)
