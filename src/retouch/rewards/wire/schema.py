"""The batch document of ``POST /v1/score``: tasks, items and what the pictures are. The pictures' bytes travel beside it.

Whatever is used by several items (a task, its source picture) stands in the document once and is referred to by its number.
Anything that is not in the schema is refused.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue

VERSION: Literal[1] = 1
NAME = r"^[A-Za-z0-9_.-]{1,64}$"

Form: TypeAlias = Literal["encoded", "raw"]
Id: TypeAlias = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
Name: TypeAlias = Annotated[str, Field(pattern=NAME)]
Number: TypeAlias = Annotated[int, Field(ge=0)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=65535)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PictureHead(_Part):
    """What the bytes of a picture are: a PNG, JPEG or WebP file, or raw pixels, row by row from the top, a byte a channel."""

    form: Form
    mode: Literal["RGB", "L"] = "RGB"
    width: Side | None = None
    """Raw pixels only."""
    height: Side | None = None
    """Raw pixels only."""


class TaskHead(_Part):
    """A task, with numbers in place of its pictures. The names are those of ``retouch.types.Task``."""

    id: str
    instruction: str
    images: list[Number] = []
    mask: Number | None = None
    reference: Number | None = None
    target: Number | None = None
    text: str | None = None
    tags: dict[str, str] = {}
    meta: dict[str, JsonValue] = {}


class Item(_Part):
    """One sample: whose task, and which picture; ``id`` comes back with its scores. No picture: nothing usable was made."""

    id: Id
    task: Number
    picture: Number | None


class Batch(_Part):
    """What is to be scored. ``rewards``: which of the server's rewards are asked; null asks all of them."""

    version: Literal[1] = VERSION
    tasks: Annotated[list[TaskHead], Field(min_length=1)]
    items: Annotated[list[Item], Field(min_length=1)]
    pictures: list[PictureHead] = []
    rewards: Annotated[list[Name], Field(min_length=1)] | None = None
