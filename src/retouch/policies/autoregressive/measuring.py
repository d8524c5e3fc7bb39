"""Log-probabilities and entropies of tokens from the states before them, without the logits of all of them at once.

The head runs over ``chunk`` places at a time and again in the backward pass, so memory grows with chunk * vocabulary and not with
rows * length * vocabulary. Places without a choice never reach the head.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retouch.core.tokens import entropy, log_prob, warp_logits
from retouch.protocols import AutoregressiveModel, Grammar


def allowed_ids(grammar: Grammar, vocabulary: Int[Tensor, " n"]) -> Bool[Tensor, "#n v"]:
    """What may be drawn at each place; one row for all of them where the grammar has one set."""
    return grammar.vocabularies if len(grammar.vocabularies) == 1 else grammar.vocabularies[vocabulary]


def measure(
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
    """log-probability of each id and, where wanted, entropy of what it was drawn from; fp32, with gradient where it is not off.

    ``vocabulary``: which of the grammar's sets each id is drawn from; ``support``: what top-k and top-p had left of it.
    """

    def some(states: Tensor, ids: Tensor, vocabulary: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logits = warp_logits(model.logits(module, states), allowed_ids(model.grammar, vocabulary), temperature=temperature)
        return log_prob(logits, ids, support=support), entropy(logits, support=support) if with_entropy else None

    log_probs, entropies = [], []
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        kept = None if support is None else support[part]
        given = (states[part], ids[part], vocabulary[part], kept)
        logged, entropy_of_part = checkpoint(some, *given, use_reentrant=False, preserve_rng_state=False)
        log_probs.append(logged)
        entropies.append(entropy_of_part)
    if not log_probs:
        # Rows without a choice still take part in the backward pass: ranks make equal numbers of them.
        nothing = states.float().sum(-1)
        return nothing, nothing if with_entropy else None
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def spread(values: Float[Tensor, " n"], choice: Bool[Tensor, "r t"]) -> Float[Tensor, "r t"]:
    """The values where there was a choice, row by row, and 0 elsewhere."""
    return values.new_zeros(choice.shape).masked_scatter(choice, values)
