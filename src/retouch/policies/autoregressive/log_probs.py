"""Log-probabilities and entropies of tokens from the hidden states before them, without keeping all logits in memory at once.

The language-model head runs on ``chunk`` tokens at a time and again in the backward pass (gradient checkpointing), so memory grows
with chunk * vocabulary and not with rows * length * vocabulary. Tokens that were not sampled never reach the head.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retouch.core.tokens import entropy, log_prob, warp_logits
from retouch.protocols import AutoregressiveModel, Grammar


def allowed_ids(grammar: Grammar, vocabulary: Int[Tensor, " n"]) -> Bool[Tensor, "#n v"]:
    """The mask of ids that may be sampled at each position, by the index of its vocabulary; one row if there is only one."""
    return grammar.vocabularies if len(grammar.vocabularies) == 1 else grammar.vocabularies[vocabulary]


def token_log_probs(
    model: AutoregressiveModel,
    module: nn.Module,
    states: Float[Tensor, "n d"],
    ids: Int[Tensor, " n"],
    *,
    vocabulary: Int[Tensor, " n"],
    support: Int[Tensor, "n w"] | None,
    temperature: float,
    chunk: int,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
    """The log-probability of each id in nats and, with ``with_entropy``, the entropy of its distribution; fp32, with gradient
    unless gradients are disabled.

    ``vocabulary``: the index of the grammar's vocabulary from which each id is sampled. ``support``: the ids of this vocabulary
    that top-k and top-p kept, padded with -1.
    """

    def head(states: Tensor, ids: Tensor, vocabulary: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logits = warp_logits(model.logits(module, states), allowed_ids(model.grammar, vocabulary), temperature=temperature)
        return log_prob(logits, ids, support=support), entropy(logits, support=support) if with_entropy else None

    log_probs, entropies = [], []
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        arguments = (states[part], ids[part], vocabulary[part], None if support is None else support[part])
        log_probs_of_part, entropies_of_part = checkpoint(head, *arguments, use_reentrant=False, preserve_rng_state=False)
        log_probs.append(log_probs_of_part)
        entropies.append(entropies_of_part)
    if not log_probs:
        # Rows without a sampled token still take part in the backward pass, because all ranks must run equally many.
        zero = states.float().sum(-1)
        return zero, zero if with_entropy else None
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def scatter(values: Float[Tensor, " n"], mask: Bool[Tensor, "r t"]) -> Float[Tensor, "r t"]:
    """``values`` at the places where ``mask`` is True, row by row, and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
