"""Rewards that ``retouch serve`` hosts, as a section of a recipe. The client that asks the servers is in ``client.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from retouch.config import keys
from retouch.config.section import Count, Positive, Share
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, unchanged
from retouch.rewards.facts import Address, PathText
from retouch.rewards.wire.schema import Bound
from retouch.types import Column, Json

if TYPE_CHECKING:
    import torch

    from retouch.rewards.quota.quota import Quota
    from retouch.rewards.vlm.base import JudgeClients


class RemoteReward(RewardSection):
    """Rewards that ``retouch serve`` hosts, at one or more addresses (docs/serving.md). A token, where the servers want one, is
    read from the environment variable RETOUCH_TOKEN, and sent only to addresses that it is bound to."""

    kind: Literal["remote"] = "remote"
    endpoints: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Addresses of servers that host the same rewards."""
    declared: dict[str, tuple[Bound, Bound]] | None = Field(default=None, alias="columns")
    """Columns that the servers must have, with their ranges, so that ``combine`` is checked when the recipe is read; null takes the
    servers' own when the run starts."""
    rewards: tuple[str, ...] | None = None
    """Which of the servers' rewards to ask; null asks all."""
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
    """Most samples in any minute; null sets no limit."""
    requests_per_minute: Positive | None = None
    """Most requests in any minute."""
    calls: Count | None = None
    """Requests in all; when they are spent the run ends with a checkpoint."""
    rate_file: PathText | None = None
    """File in which the processes of a machine count these together; null gives each rank its share."""
    wait: Positive = 60.0
    """Seconds to wait for the first server to answer."""

    shorthand = "endpoints"
    changeable: ClassVar[frozenset[str]] = frozenset(
        {
            *(
                "endpoints",
                "encoding",
                "batch",
                "concurrency",
                "timeout",
                "deadline",
                "attempts",
                "retry_share",
                "hedge",
                "hedge_share",
            ),
            *("samples_per_minute", "requests_per_minute", "calls", "rate_file", "wait"),
        }
    )

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

    def known_columns(self) -> Mapping[str, Column] | None:
        """The declared ones."""
        return None if self.declared is None else {name: Column(low, high) for name, (low, high) in self.declared.items()}

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """A client that has found the servers. ValueError: none answers, they differ, they refuse, or they lack a declared
        column."""
        from retouch.rewards.client.client import RemoteClient

        client = RemoteClient(self)
        for name, (low, high) in (self.declared or {}).items():
            given = client.columns.get(name)
            if given is None or (given.low, given.high) != (low, high):
                found = "have no such column" if given is None else f"give it from {given.low:g} to {given.high:g}"
                has = ", ".join(f"{column} {c.low:g} to {c.high:g}" for column, c in client.columns.items())
                client.close()
                raise ValueError(
                    f"reward.columns: {name} is to be from {low:g} to {high:g}, and the servers {found}; they give {has}"
                )
        return keep(client)

    @classmethod
    def from_word(cls, argument: str) -> Json:
        """One address."""
        return [argument]
