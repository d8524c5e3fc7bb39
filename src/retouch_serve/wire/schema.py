"""The JSON documents of the HTTP interface: the batch of ``POST /v1/score``, and the reply of ``GET /v1/info``.

In a batch, a task or an image that several items share is listed once and referred to by its number. The images' bytes follow the
document in the body. Keys that are not in the schema are rejected.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

VERSION: Literal[1] = 1
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
SERVICE: Literal["retouch"] = "retouch"
LARGEST = 1e9
"""The largest absolute value of a score: far above any scale in use, and its square is still finite in float32."""

Form: TypeAlias = Literal["encoded", "raw"]
Id: TypeAlias = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
Name: TypeAlias = Annotated[str, Field(pattern=NAME)]
Number: TypeAlias = Annotated[int, Field(ge=0)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=65535)]
Bound: TypeAlias = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Limit: TypeAlias = Annotated[int, Field(ge=1, le=2**62)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PictureHead(_Part):
    """The format of an image's bytes: a PNG, JPEG or WebP file, or raw pixels, row by row from the top, one byte per channel."""

    form: Form
    mode: Literal["RGB", "L"] = "RGB"
    width: Side | None = None
    """Raw pixels only."""
    height: Side | None = None
    """Raw pixels only."""


class TaskHead(_Part):
    """A task, with the numbers of its images. It has the fields of ``retouch.types.Task``."""

    id: str
    instruction: str
    images: list[Number] = []
    mask: Number | None = None
    reference: Number | None = None
    target: Number | None = None
    text: str | None = None
    tags: dict[str, str] = {}
    meta: dict[str, JsonValue] = {}


class BatchItem(_Part):
    """One sample: the numbers of its task and of its image, null if the policy made no image. ``id`` is returned with the
    scores."""

    id: Id
    task: Number
    picture: Number | None


class BatchDocument(_Part):
    """The samples to score. ``rewards``: the names of the rewards to ask; null for all rewards of the server."""

    version: Annotated[int, Field(ge=VERSION, le=VERSION)] = VERSION
    tasks: Annotated[list[TaskHead], Field(min_length=1)]
    items: Annotated[list[BatchItem], Field(min_length=1)]
    pictures: list[PictureHead] = []
    rewards: Annotated[list[Name], Field(min_length=1)] | None = None


class _InfoPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ColumnInfo(_InfoPart):
    """A column, with the fields of ``retouch.types.Column``. Its range is finite and within ``LARGEST``."""

    low: Bound
    high: Bound
    diagnostic: bool = False
    higher_is_better: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"the range {self.low} to {self.high} is empty")
        return self


class RewardInfo(_InfoPart):
    """A hosted reward. ``kind``: its class. ``fingerprint``: a hash that changes with its code, its arguments and its rubric."""

    name: Name
    kind: Annotated[str, Field(max_length=512)]
    fingerprint: Annotated[str, Field(min_length=1, max_length=128)]
    columns: Annotated[dict[Annotated[str, Field(min_length=1, max_length=256)], ColumnInfo], Field(min_length=1, max_length=256)]


class LimitsInfo(_InfoPart):
    """The largest request that the server accepts."""

    max_body_bytes: Limit
    max_items: Limit
    max_pixels: Limit
    max_total_pixels: Limit


class ServerInfo(_InfoPart):
    """The reply of ``GET /v1/info``: what a client needs to know before its first request."""

    service: Literal["retouch"]
    version: Annotated[str, Field(max_length=64)]
    rewards: Annotated[list[RewardInfo], Field(min_length=1, max_length=256)]
    limits: LimitsInfo

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [each.name for each in self.rewards]
        columns = [column for each in self.rewards for column in each.columns]
        if len(set(names)) < len(names) or len(set(columns)) < len(columns):
            raise ValueError("a reward or a column has the name of another one")
        return self
