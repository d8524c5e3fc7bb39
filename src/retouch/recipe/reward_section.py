"""What the sections of all rewards are made of."""

from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Field, Tag

from retouch.config.section import UNTAGGED, Section, Share

RewardDevice: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] | None


def _form(value: Any) -> str:
    return "formula" if isinstance(value, str) else UNTAGGED


Combine: TypeAlias = Annotated[
    Annotated[dict[str, float], Tag(UNTAGGED)] | Annotated[str, Tag("formula")],
    Discriminator(_form),
]


class RewardSection(Section):
    """What all rewards have in common; the parts of ``several`` have neither, since these stand above them."""

    combine: Combine = Field(default={})
    """What the policy is trained on: weights of columns, whose weighted sum it then is (0: only logged), or a formula over them,
    ``sqrt(alignment * quality)``."""
    max_missing: Share = 0.2
    """Share of a step's samples that may come back unjudged before the run stops."""
