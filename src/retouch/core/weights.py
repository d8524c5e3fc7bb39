"""Loss weights (b, t), which make the gradient independent of microbatches and of the number of ranks.

The loss of a minibatch is the plain sum of weight times loss over its actions. ``denominator`` gives this rank's share of the
normaliser, a scalar. Sum it over ranks (all-reduce) and pass the sum to ``loss_weights`` as ``total``. With "token" and "sequence"
the weights then sum to 1 over the minibatch of all ranks. Invalid rows and masked actions have weight 0.

- "token": every action has the same weight (DAPO, arXiv 2503.14476);
- "sequence": every row with an action has the same weight, divided equally among its actions (GRPO, arXiv 2402.03300);
- "dr_grpo": every action has weight 1 / (valid rows * max_length) (Dr. GRPO, arXiv 2503.20783).
"""

from typing import Literal, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

Normalise: TypeAlias = Literal["token", "sequence", "dr_grpo"]


def loss_weights(
    mask: Bool[Tensor, "b t"],
    valid: Bool[Tensor, " b"],
    *,
    normalise: Normalise,
    max_length: int | None = None,
    total: Float[Tensor, ""] | None = None,
) -> Float[Tensor, "b t"]:
    """``numerators / total``, as (b, t); all 0 if ``total`` is 0.

    ``mask``: (b, t), True for the actions that train. ``valid``: (b,), False for rows without a reward. ``total``: the sum of
    ``denominator`` over all ranks; None if there is one rank. Raises ValueError in the same cases as ``denominator``.

    Sources: see ``numerators``; GRPO (arXiv 2402.03300), DAPO (arXiv 2503.14476) and Dr. GRPO (arXiv 2503.20783) differ in these
    weights.
    """
    if total is None:
        total = denominator(mask, valid, normalise=normalise, max_length=max_length)
    return numerators(mask, valid, normalise=normalise) / total.masked_fill(total == 0, 1)


def numerators(mask: Bool[Tensor, "b t"], valid: Bool[Tensor, " b"], *, normalise: Normalise) -> Float[Tensor, "b t"]:
    """The weight (b, t) of each action before division by the denominator. Raises ValueError for an unknown ``normalise``.

    Sources: "sequence" is GRPO's (arXiv 2402.03300), "token" DAPO's (arXiv 2503.14476), "dr_grpo" Dr. GRPO's (arXiv 2503.20783).
    """
    counts = (mask & valid[:, None]).float()
    if normalise == "sequence":
        return counts / counts.sum(1, keepdim=True).clamp(min=1)
    if normalise in ("token", "dr_grpo"):
        return counts
    raise ValueError(f"normalise {normalise!r}: choose 'token', 'sequence' or 'dr_grpo'")


def denominator(
    mask: Bool[Tensor, "b t"], valid: Bool[Tensor, " b"], *, normalise: Normalise, max_length: int | None = None
) -> Float[Tensor, ""]:
    """This rank's share of the denominator, a scalar.

    It is the number of valid actions ("token"), the number of valid rows with an action ("sequence"), or the number of valid rows
    times ``max_length`` ("dr_grpo"). ``max_length`` is the largest possible number of actions of a row. Raises ValueError if
    "dr_grpo" is used without a positive ``max_length``, if another mode is used with ``max_length``, or if the mode is unknown.
    """
    if (normalise == "dr_grpo") != (max_length is not None):
        raise ValueError(f"normalise {normalise!r} with max_length {max_length}: 'dr_grpo' needs max_length, and only it takes one")
    if normalise == "token":
        return (mask & valid[:, None]).float().sum()
    if normalise == "sequence":
        return (mask.any(1) & valid).float().sum()
    if max_length is None or max_length < 1:
        raise ValueError(f"normalise {normalise!r} with max_length {max_length}: give a mode of {Normalise} and at least 1 action")
    return valid.float().sum() * max_length
