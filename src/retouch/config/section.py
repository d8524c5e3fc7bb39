"""What every part of a recipe is: a frozen, typed record that knows each of its keys and takes no other."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

UNTAGGED = "(no kind)"
"""How a section that has no kind is told from its alternatives that have one."""


class Section(BaseModel):
    """Types are strict (``"3"`` is no number, 3.5 no count), numbers finite, unknown keys refused.

    The text under a field is its documentation. ``renamed_keys``: former name to present name of keys; a recipe with a former name
    gets an error that states the present one.
    """

    renamed_keys: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )


Count: TypeAlias = Annotated[int, Field(ge=1)]
Cadence: TypeAlias = Annotated[int, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0)]
Positive: TypeAlias = Annotated[float, Field(gt=0.0)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0.0)]
Pixels: TypeAlias = tuple[Count, Count]
ClassPath: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
