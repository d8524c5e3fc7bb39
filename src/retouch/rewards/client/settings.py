"""The keys of rewards that ``retouch serve`` hosts, as the client reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from retouch.config import keys
from retouch.config.section import Count, Positive, Section, Share
from retouch.rewards.facts import Address, PathText
from retouch.rewards.wire.schema import Bound

if TYPE_CHECKING:
    from retouch.rewards.quota.quota import Quota


class RemoteSettings(Section):
    """Which servers to ask, and how; ``RemoteReward`` asks them."""

    kind: Literal["remote"] = "remote"
    endpoints: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Addresses of servers that host the same rewards."""
    declared: dict[str, tuple[Bound, Bound]] | None = Field(default=None, alias="columns")
    """Columns that the servers must have, with their ranges, so that ``combine`` is checked when the recipe is read; null takes the
    servers' own when the run starts."""
    rewards: tuple[str, ...] | None = None
    """Which of the servers' rewards to use; null uses all."""
    encoding: Literal["auto", "webp", "raw"] = "auto"
    """How images are sent: ``webp`` (lossless), ``raw`` pixels, or ``auto``: raw to this machine, and WebP to others."""
    batch: Count = 8
    """Samples in a request."""
    concurrency: Count = 4
    """Requests in flight at once to each endpoint, from each rank."""
    timeout: Positive = 60.0
    """Seconds that one attempt may take."""
    deadline: Positive = 120.0
    """Seconds in which a request must be answered, further attempts included. Requests that wait for a place in flight give up when
    nothing was answered for so long. Samples without a score by then are missing."""
    attempts: Count = 5
    """How often one request is sent."""
    retry_share: Share = 0.1
    """Further attempts, as a share of all requests."""
    hedge: bool = False
    """Ask a second endpoint when the first takes longer than 95 % of the latest requests."""
    hedge_share: Share = 0.05
    """Largest share of requests that are sent to a second endpoint in this way."""
    samples_per_minute: Positive | None = None
    """Maximum number of samples in any 60 seconds; null sets no limit."""
    requests_per_minute: Positive | None = None
    """Maximum number of requests in any 60 seconds."""
    calls: Count | None = None
    """Maximum number of requests of the run; when it is reached, the run ends with a checkpoint."""
    rate_file: PathText | None = None
    """File with the count that the processes of a machine share; null gives each rank its share of the limits."""
    wait: Positive = 60.0
    """Seconds to wait for the first server to answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.endpoints)) < len(self.endpoints):
            raise ValueError(f"endpoints {list(self.endpoints)}: name each once")
        if self.rate_file is not None and not self._limited:
            raise ValueError("rate_file needs samples_per_minute, requests_per_minute or calls beside it")
        return self

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """The token with each endpoint, if there is a token."""
        yield from ((keys.TOKEN, url) for url in self.endpoints if keys.TOKEN in os.environ)

    @property
    def token(self) -> str | None:
        """The token in the environment. ValueError: it may not be sent to each of the endpoints (``retouch.config.keys``)."""
        token = os.environ.get(keys.TOKEN)
        for variable, url in self.keys_sent():
            keys.require_bound(variable, url)
        return token

    @property
    def _limited(self) -> bool:
        return (self.samples_per_minute, self.requests_per_minute, self.calls) != (None, None, None)

    def open_quota(self) -> Quota | None:
        """The counter of samples and requests; None where nothing limits them. ValueError: a request has more than a minute's
        samples."""
        from retouch.rewards.quota.quota import Quota

        if not self._limited:
            return None
        return Quota(
            requests_per_minute=self.requests_per_minute,
            units_per_minute=self.samples_per_minute,
            largest=self.batch,
            calls=self.calls,
            file=self.rate_file,
        )
