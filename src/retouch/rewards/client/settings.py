"""How a client asks: whom, how much at once, how long and how often."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from retouch.rewards.quota.quota import Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds; see ``retouch.rewards.client.client.RemoteReward``. ValueError where something is out of range."""

    endpoints: Sequence[str]
    token: str | None
    rewards: Sequence[str] | None
    encoding: Literal["auto", "webp", "raw"]
    batch: int
    concurrency: int
    deadline: float
    timeout: float
    attempts: int
    retry_share: float
    hedge: bool
    hedge_share: float
    samples_per_minute: float | None
    requests_per_minute: float | None
    calls: int | None
    rate_file: Path | None

    def __post_init__(self) -> None:
        for url in self.endpoints:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
                raise ValueError(f"endpoint {url!r}: give http://host:port")
        if not self.endpoints or len(set(self.endpoints)) < len(self.endpoints):
            raise ValueError(f"endpoints {list(self.endpoints)}: name at least one, and each once")
        if self.encoding not in ("auto", "webp", "raw"):
            raise ValueError(f"encoding {self.encoding!r}: choose auto, webp or raw")
        for name in ("batch", "concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: at least 1")
        for name in ("deadline", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: a number of seconds above 0")
        for name in ("retry_share", "hedge_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: a share, 0 to 1")
        if self.rate_file is not None and not self._limited:
            raise ValueError("rate_file needs samples_per_minute, requests_per_minute or calls beside it")

    @property
    def _limited(self) -> bool:
        return (self.samples_per_minute, self.requests_per_minute, self.calls) != (None, None, None)

    def quota(self) -> Quota | None:
        """What may be asked; None where nothing limits it. ValueError: a request is more than a minute's samples."""
        if not self._limited:
            return None
        return Quota(
            requests_per_minute=self.requests_per_minute,
            units_per_minute=self.samples_per_minute,
            largest=self.batch,
            calls=self.calls,
            file=self.rate_file,
        )
