"""The recipe section of an autoregressive rollout: how a policy samples completions, and the table of engines.

Recipes import this file, so it imports no torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.kinds import Kinds
from retouch.config.section import Count
from retouch.policies.context import SharedRollout
from retouch.policies.engine import Engine, EngineContext, EngineSection, TokenSampling
from retouch.protocols import AutoregressiveModel

ENGINES = Kinds(
    "engine",
    {
        "cached": "retouch.policies.autoregressive.rollout:CachedEngine",
    },
    with_wings=True,
)


class CachedEngine(EngineSection):
    """The policy's own model generates, token by token with a key-value cache. In float32 its log-probabilities are exact."""

    kind: Literal["cached"] = "cached"
    check_every: Count | None = Field(default=None, exclude_if=operator.not_)
    """Number of tokens after which the host asks the device whether completions have ended; each check waits for all queued
    kernels. null means 1 on the CPU and 16 elsewhere."""
    static: bool = Field(default=False, exclude_if=operator.not_)
    """Allocate the cache for ``max_new_tokens`` from the start, so that every forward pass of generation has the same shapes and
    does not wait for the device. Needs the memory of the longest completion for every row; meant for accelerators."""

    def build(self, model: AutoregressiveModel, context: EngineContext) -> Engine:
        from retouch.policies.autoregressive.decoding import CachedDecoding

        any_rank = context.any_rank if context.in_step else bool
        return CachedDecoding(model, check_every=self.check_every, static=self.static, any_rank=any_rank)


class TokenRollout(TokenSampling, SharedRollout):
    """How a policy that writes tokens samples during training."""

    chunk: Count = 128
    """Number of rows that are generated at once."""
    engine: Annotated[EngineSection, ENGINES] | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """The engine that generates the completions; null means ``cached`` with its defaults."""

    is_autoregressive: ClassVar[bool] = True

    @property
    def actions(self) -> int | None:
        """Number of actions of every row; None, because completions have different lengths."""
        return None

    @property
    def longest(self) -> int:
        """The largest number of actions that a row can have."""
        return self.max_new_tokens

    def problems(self, key: str) -> Iterator[str]:
        """Yield a line for each setting that cannot work, as "key: mistake; what to do"."""
        yield from ()
