"""How a policy samples while it learns: a denoising chain, or tokens."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from retouch.config.section import UNTAGGED, Count, Positive, Section
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.recipe.engine import Engine


class TokenRollout(Section):
    """How a policy of tokens samples while it learns."""

    kind: Literal["tokens"]
    max_new_tokens: Count
    """Longest completion; what has not ended by then is cut off."""
    temperature: Positive = 1.0
    """Logits are divided by it, in sampling and training alike."""
    top_k: Count | None = None
    """Only the so many likeliest tokens are drawn from; null leaves all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Only the likeliest tokens that together have this probability are drawn from; null leaves all."""
    chunk: Count = 128
    """Rows written at once."""
    engine: Engine | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """What writes them; null is ``cached`` with its defaults."""

    writes_tokens: ClassVar[bool] = True

    @property
    def actions(self) -> int | None:
        """Actions of a row: it ends where the policy ends it."""
        return None

    @property
    def longest(self) -> int:
        """Most actions that a row can have."""
        return self.max_new_tokens

    def problems(self, key: str) -> Iterator[str]:
        """A line for everything in it that cannot work, as "key: mistake; what to do"."""
        yield from ()


def _which(value: Any) -> str:
    """A rollout without a kind is a denoising chain's."""
    kind = value.get("kind", UNTAGGED) if isinstance(value, dict) else getattr(value, "kind", UNTAGGED)
    return kind if isinstance(kind, str) else UNTAGGED


Rollout: TypeAlias = Annotated[
    Annotated[DenoisingRollout, Tag(UNTAGGED)] | Annotated[TokenRollout, Tag("tokens")], Discriminator(_which)
]
