"""Loss weights of every row and action, so that the gradient depends neither on how a batch is cut nor on how many ranks share it.

Two pure steps: ``numerators`` (b, t) and the ``denominator``, a scalar that is this rank's share. Summed over the ranks
(all-reduce) it goes to ``loss_weights`` as ``total``; the weights then sum to 1 over the minibatch of all ranks ("token",
"sequence"), and the loss is the plain sum of weight times loss. A row that is not valid has weight 0, and so has a masked action.

"token": every action counts the same (DAPO, arXiv 2503.14476). "sequence": every row with an action counts the same, and its
actions share its weight (GRPO, arXiv 2402.03300). "dr_grpo": every action weighs 1 / (valid rows * max_length) (Dr. GRPO, arXiv
2503.20783).
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
    """Numerators over ``total``, the sum of the denominators of all ranks; None: this rank is alone. All 0 where the total is 0."""
    if total is None:
        total = denominator(mask, valid, normalise=normalise, max_length=max_length)
    return numerators(mask, valid, normalise=normalise) / total.masked_fill(total == 0, 1)


def numerators(mask: Bool[Tensor, "b t"], valid: Bool[Tensor, " b"], *, normalise: Normalise) -> Float[Tensor, "b t"]:
    """What each action counts, before division by the denominator of all ranks."""
    counts = (mask & valid[:, None]).float()
    if normalise == "sequence":
        return counts / counts.sum(1, keepdim=True).clamp(min=1)
    if normalise in ("token", "dr_grpo"):
        return counts
    raise ValueError(f"normalise {normalise!r}: choose 'token', 'sequence' or 'dr_grpo'")


def denominator(
    mask: Bool[Tensor, "b t"], valid: Bool[Tensor, " b"], *, normalise: Normalise, max_length: int | None = None
) -> Float[Tensor, ""]:
    """This rank's share of the denominator: valid actions, valid rows with an action, or valid rows times ``max_length``.

    ValueError: "dr_grpo" without a positive ``max_length`` (the longest row that the policy may make, in actions), or a
    ``max_length`` that the other ways would not read.
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
