"""Choose a server for each request: the one with the fewest samples in progress, if possible one that did not fail on it before."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch

from retouch.core.random import generator
from retouch_serve.client.transport import RequestFault
from retouch_serve.wire.hosts import is_loopback

_PROBE_PAUSE = 0.5  # seconds between the probes of an excluded server


@dataclass(slots=True, eq=False)
class EndpointState:
    """A server and its recent behaviour.

    ``in_progress``: number of samples that were sent and are not answered. ``excluded``: whether it failed, and no probe has shown
    since that it is back; the next probe is due at ``probe_at``. ``paused_until``: the end of the pause that the server's
    Retry-After header asked for. Times are those of the pool's clock.
    """

    url: str
    in_progress: int = 0
    excluded: bool = False
    probe_at: float = 0.0
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
        available = [each for each in self.endpoints if not each.excluded and each.paused_until <= now]
        preferred = [each for each in available if each not in avoid] or available
        if not preferred:
            return None
        least = min(each.in_progress for each in preferred)
        equal = [each for each in preferred if each.in_progress == least]
        return equal[int(torch.randint(len(equal), (), generator=self._ties))]

    def failed(self, endpoint: EndpointState, fault: RequestFault) -> None:
        """Record a failed request."""
        now = self._clock()
        if fault.retry_after:
            endpoint.paused_until = now + min(fault.retry_after, 10.0)
        others = any(not each.excluded for each in self.endpoints if each is not endpoint)
        # The last server stays in use, because a failing one is better than none. A slow one does not: a probe shows within seconds
        # whether it is back, but a request may take its full time-out.
        if fault.slow or (fault.blames_server and others):
            endpoint.excluded, endpoint.probe_at = True, now + _PROBE_PAUSE

    def probes_due(self) -> list[EndpointState]:
        """The excluded servers that should be probed now."""
        now = self._clock()
        return [each for each in self.endpoints if each.excluded and now >= each.probe_at]

    def probed(self, endpoint: EndpointState, *, succeeded: bool) -> None:
        """Record the result of a probe."""
        endpoint.excluded = not succeeded
        endpoint.probe_at = self._clock() + _PROBE_PAUSE
        if succeeded:
            endpoint.paused_until = 0.0
