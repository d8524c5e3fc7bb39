"""Choose a server for each request: the one with the fewest samples in progress, if possible one that did not fail on it before."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch

from retouch.core.random import generator
from retouch.rewards.client.overload import CircuitBreaker
from retouch.rewards.client.transport import RequestFault
from retouch.rewards.wire.hosts import is_loopback


@dataclass(slots=True, eq=False)
class EndpointState:
    """A server and its recent behaviour.

    ``in_progress``: number of samples that were sent and are not answered. ``paused_until``: the end of the pause that the server's
    Retry-After header asked for.
    """

    url: str
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    in_progress: int = 0
    paused_until: float = 0.0

    @property
    def local(self) -> bool:
        """Whether the server is on this machine; sending raw pixels is then faster than compressing them."""
        return is_loopback(urlsplit(self.url).hostname or "")


class EndpointPool:
    """The servers of one client, used on one event loop. ``clock``: returns seconds."""

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoints = [EndpointState(url) for url in urls]
        self._clock = clock
        self._ties = generator("remote", "ties", *urls)

    def choose(self, avoid: Collection[EndpointState] = ()) -> EndpointState | None:
        """The server for the next request, if possible none of ``avoid``; ties are broken at random. None if all are excluded or
        paused."""
        now = self._clock()
        available = [each for each in self.endpoints if each.breaker.closed and each.paused_until <= now]
        preferred = [each for each in available if each not in avoid] or available
        if not preferred:
            return None
        least = min(each.in_progress for each in preferred)
        equal = [each for each in preferred if each.in_progress == least]
        return equal[int(torch.randint(len(equal), (), generator=self._ties))]

    def succeeded(self, endpoint: EndpointState) -> None:
        """Record a valid reply."""
        endpoint.breaker.succeeded()

    def failed(self, endpoint: EndpointState, fault: RequestFault) -> None:
        """Record a failed request."""
        now = self._clock()
        if fault.retry_after:
            endpoint.paused_until = now + min(fault.retry_after, 10.0)
        if fault.slow:
            # Also the last closed one: a probe shows within seconds whether it is back, a request may take its full time-out.
            if endpoint.breaker.closed:
                endpoint.breaker.open(now)
        elif fault.blames_server:
            others = any(each.breaker.closed for each in self.endpoints if each is not endpoint)
            endpoint.breaker.failed(now, last=not others)

    def probes_due(self) -> list[EndpointState]:
        """The excluded servers that should be probed now."""
        now = self._clock()
        return [each for each in self.endpoints if each.breaker.probe_due(now)]

    def probed(self, endpoint: EndpointState, *, succeeded: bool) -> None:
        """Record the result of a probe."""
        if succeeded:
            endpoint.breaker.succeeded()
            endpoint.paused_until = 0.0
        else:
            endpoint.breaker.open(self._clock())
