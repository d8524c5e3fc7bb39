"""Which endpoint to ask: the closed one with the least in hand, another one than failed before."""

import ipaddress
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch

from retouch.core.random import generator
from retouch.rewards.client.breaker import Breaker
from retouch.rewards.client.faults import Fault


@dataclass(slots=True, eq=False)
class Endpoint:
    """A server's address, and how it has been doing. ``in_hand``: samples that it is asked about now."""

    url: str
    breaker: Breaker = field(default_factory=Breaker)
    in_hand: int = 0
    rests_until: float = 0.0

    @property
    def local(self) -> bool:
        """Whether it is on this machine, so that sending is cheaper than compressing."""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


class Pool:
    """The endpoints of one client. All calls come from one event loop; ``clock`` is in seconds."""

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self._clock = clock
        self._ties = generator("remote", "ties", *urls)

    def choose(self, avoid: Collection[Endpoint] = ()) -> Endpoint | None:
        """The endpoint to ask now, if possible none of ``avoid``. None: all that are closed asked to be left alone."""
        now = self._clock()
        awake = [each for each in self.endpoints if each.breaker.closed and each.rests_until <= now]
        wanted = [each for each in awake if each not in avoid] or awake
        if not wanted:
            return None
        least = min(each.in_hand for each in wanted)
        equal = [each for each in wanted if each.in_hand == least]
        return equal[int(torch.randint(len(equal), (), generator=self._ties))]

    def succeeded(self, endpoint: Endpoint) -> None:
        """It answered as it should."""
        endpoint.breaker.succeeded()

    def failed(self, endpoint: Endpoint, fault: Fault) -> None:
        """It did not."""
        now = self._clock()
        if fault.rest:
            endpoint.rests_until = now + min(fault.rest, 10.0)
        if fault.blame:
            others = any(each.breaker.closed for each in self.endpoints if each is not endpoint)
            endpoint.breaker.failed(now, last=not others)

    def due(self) -> list[Endpoint]:
        """Those that are to be probed now."""
        now = self._clock()
        return [each for each in self.endpoints if each.breaker.due(now)]

    def probed(self, endpoint: Endpoint, *, well: bool) -> None:
        """What a probe found."""
        if well:
            endpoint.breaker.succeeded()
            endpoint.rests_until = 0.0
        else:
            endpoint.breaker.open(self._clock())
