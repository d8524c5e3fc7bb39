"""The recipe keys of a reward that ``retouch serve`` hosts, which ``client`` reads."""

import os
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from retouch.config import keys
from retouch.config.section import Count, Positive, Section, Share
from retouch.rewards.base import Address, PathText
from retouch_serve.wire import Bound


class RemoteSettings(Section):
    """The addresses of the servers, and how requests are sent; ``RemoteReward`` sends them."""

    kind: Literal["remote"] = "remote"
    endpoints: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Addresses of servers that host the same rewards."""
    declared: dict[str, tuple[Bound, Bound]] | None = Field(default=None, alias="columns")
    """Columns that the servers must have, with their ranges, so that ``combine`` is checked when the recipe is read; null uses the
    columns of the servers, which are read when the run starts."""
    rewards: tuple[str, ...] | None = None
    """The names of the servers' rewards to use; null uses all."""
    encoding: Literal["auto", "webp", "raw"] = "auto"
    """How images are sent: ``webp`` (lossless), ``raw`` pixels, or ``auto``: raw to servers on this machine, WebP to others."""
    batch: Count = 8
    """Samples per request."""
    concurrency: Count = 4
    """Largest number of requests in flight from each rank to each endpoint."""
    timeout: Positive = 60.0
    """Seconds that one attempt may take."""
    deadline: Positive = 120.0
    """Seconds in which a request must be answered, including further attempts. A request that waits to be sent is dropped if no
    request was answered for this time. Samples without a score at the deadline are missing."""
    attempts: Count = 5
    """Maximum number of attempts per request."""
    retry_share: Share = 0.1
    """Largest share of requests that are sent again."""
    samples_per_minute: Positive | None = None
    """Maximum number of samples in any 60 seconds; null sets no limit."""
    requests_per_minute: Positive | None = None
    """Maximum number of requests in any 60 seconds."""
    calls: Count | None = None
    """Maximum number of requests of the run; when it is reached, the run ends with a checkpoint."""
    rate_file: PathText | None = None
    """File with the counters that the processes of a machine share; null gives each rank its share of the limits."""
    wait: Positive = 60.0
    """Seconds to wait for the first server to answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.endpoints)) < len(self.endpoints):
            raise ValueError(f"endpoints {list(self.endpoints)} has duplicates; name each address once")
        if self.rate_file is not None and not self.is_limited:
            raise ValueError("rate_file needs samples_per_minute, requests_per_minute or calls next to it")
        return self

    @property
    def is_limited(self) -> bool:
        """Whether the number of samples or requests has a limit."""
        return (self.samples_per_minute, self.requests_per_minute, self.calls) != (None, None, None)

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Yield the token's environment variable with each endpoint, if the variable is set and not empty."""
        yield from ((keys.TOKEN, url) for url in self.endpoints if os.environ.get(keys.TOKEN))

    @property
    def token(self) -> str | None:
        """The token in the environment. Raises ValueError if it must not be sent to one of the endpoints
        (``retouch.config.keys``)."""
        for variable, url in self.keys_sent():
            keys.require_bound(variable, url)
        return os.environ.get(keys.TOKEN) or None  # an empty variable would be an invalid header
