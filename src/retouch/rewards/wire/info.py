"""``/v1/info``: what a server judges by, and how much it takes at once."""

from pydantic import BaseModel, ConfigDict

from retouch.rewards.wire.schema import Name


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ColumnInfo(_Part):
    """A column's declared range and its better end; a diagnostic decides nothing and may be null where it does not apply."""

    low: float
    high: float
    diagnostic: bool = False
    higher_is_better: bool = True


class RewardInfo(_Part):
    """A reward that the server hosts. ``fingerprint``: changes when its code, its arguments or its rubric do."""

    name: Name
    kind: str
    fingerprint: str
    columns: dict[str, ColumnInfo]


class LimitsInfo(_Part):
    """The largest request that is read."""

    max_body_bytes: int
    max_items: int
    max_pixels: int
    max_total_pixels: int


class Info(_Part):
    """Everything that a client must know before it asks, and a resumed run must find unchanged."""

    service: str
    version: str
    rewards: list[RewardInfo]
    limits: LimitsInfo
