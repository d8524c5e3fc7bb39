"""How a policy samples while it learns: a denoising chain, or tokens."""

from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Tag

from retouch.config.section import UNTAGGED
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.denoising.rollout import DenoisingRollout


def _which(value: Any) -> str:
    """A rollout without a kind is a denoising chain's."""
    kind = value.get("kind", UNTAGGED) if isinstance(value, dict) else getattr(value, "kind", UNTAGGED)
    return kind if isinstance(kind, str) else UNTAGGED


Rollout: TypeAlias = Annotated[
    Annotated[DenoisingRollout, Tag(UNTAGGED)] | Annotated[TokenRollout, Tag("tokens")], Discriminator(_which)
]
