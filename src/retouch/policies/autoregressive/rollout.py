"""How an autoregressive policy samples completions: the recipe's section, and the table of engines.

Recipes import this file, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.kinds import Kinds
from retouch.config.section import Count
from retouch.policies.engines.base import Engine, EngineContext, EngineSection, TokenSampling
from retouch.protocols import AutoregressiveModel

ENGINES = Kinds(
    "engine",
    {
        "cached": "retouch.policies.autoregressive.rollout:CachedEngine",
        "vllm": "retouch.policies.engines.vllm:VllmEngine",
    },
)


class CachedEngine(EngineSection):
    """The policy's own model generates, token by token with a key-value cache. In float32 its log-probabilities are exact."""

    kind: Literal["cached"] = "cached"

    def build(self, model: AutoregressiveModel, context: EngineContext) -> Engine:
        from retouch.policies.autoregressive.decoding import CachedDecoding

        return CachedDecoding(model, any_rank=context.any_rank if context.in_step else bool)


class TokenRollout(TokenSampling):
    """How a token policy samples during training."""

    chunk: Count = 128
    """Rows generated at once."""
    engine: Annotated[EngineSection, ENGINES] | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """What generates the completions; null is ``cached`` with its defaults."""

    writes_tokens: ClassVar[bool] = True

    @property
    def actions(self) -> int | None:
        """Actions of every row; None, since a completion may end anywhere."""
        return None

    @property
    def longest(self) -> int:
        """Most actions that a row can have."""
        return self.max_new_tokens

    def problems(self, key: str) -> Iterator[str]:
        """A line for everything in it that cannot work, as "key: mistake; what to do"."""
        yield from ()
