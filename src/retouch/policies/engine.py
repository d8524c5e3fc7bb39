"""What an engine gets and returns: the settings of sampling, the completions of a batch, and its fault. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retouch.config.section import Count, Positive, Section

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


class TokenSampling(Section):
    """How completions are sampled."""

    kind: Literal["tokens"] = "tokens"
    max_new_tokens: Count
    """Maximum number of tokens of a completion; a longer one is truncated."""
    temperature: Positive = 1.0
    """Logits are divided by the temperature, in sampling and in training."""
    top_k: Count | None = None
    """Sample only from the k most likely tokens; null keeps all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample only from the most likely tokens whose probabilities reach this sum; null keeps all."""

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p may leave out ids that the grammar allows."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)


class EngineFault(ValueError):
    """An engine failed, or its probabilities are too far from the policy's. Raised on all ranks, before any update of the step."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Generation:
    """The completions of a batch, row by row; t is ``max_new_tokens``, and ids after the end of a row are ``pad``.

    ``lengths``: number of tokens of each row, including its end token. ``log_probs``: in nats, as the engine reports them; 0 where
    no token was sampled. ``support``: the ids that top-k and top-p kept at each position, padded with -1; None if all were kept.
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    log_probs: Float[Tensor, "b t"]
    support: Int[Tensor, "b t w"] | None = None
