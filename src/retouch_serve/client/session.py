"""Scores one chunk of samples with one of several servers, with retries; and the choice of the server."""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch

from retouch.core.random import generator
from retouch.rewards.quota.event_loop import ProgressSemaphore
from retouch.rewards.quota.quota import Quota, Turns
from retouch.types import Sample
from retouch_serve.client.discovery import judges_of, read_info
from retouch_serve.client.settings import RemoteSettings
from retouch_serve.client.transport import RequestFault, Transport
from retouch_serve.wire.bodies import encode_body
from retouch_serve.wire.errors import is_loopback
from retouch_serve.wire.packing import ImageEncoding, pack
from retouch_serve.wire.replies import ExpectedReply, InvalidReply, ItemScores, read_reply

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


_LOG = logging.getLogger("retouch.rewards")
_PROBE_SECONDS = 2.0
_PATIENCE = 0.5  # share of the time limit; a request that ends earlier without a reply says nothing about its server
_POLL = 0.02
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 2.0  # seconds between attempts


@dataclass(slots=True, eq=False)
class Chunk:
    """Samples that are sent together, by id, and their scores so far. ``began`` and ``expires``: times of ``time.monotonic``.

    ``bodies``: the request body for each encoding, with the ids that it contains. ``faults``: the reasons of failed attempts, in
    order. ``seconds``: the time of all attempts, including waiting.
    """

    samples: dict[str, Sample]
    began: float
    expires: float = 0.0
    scores: dict[str, ItemScores] = field(default_factory=dict)
    bodies: dict[ImageEncoding, tuple[frozenset[str], bytes, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample], began: float) -> "Chunk":
        """Make a chunk with new ids."""
        name = secrets.token_hex(6)
        return cls({f"{name}-{number}": sample for number, sample in enumerate(samples)}, began)

    @property
    def unscored(self) -> list[str]:
        """The ids without scores, and those for which a reward failed."""
        return [name for name in self.samples if name not in self.scores or self.scores[name].failed]

    def body(self, encoding: ImageEncoding, rewards: Sequence[str] | None) -> tuple[bytes, str]:
        """The request body for the unscored samples and its content type; a body is reused while the same samples are unscored."""
        wanted = frozenset(self.unscored)
        known = self.bodies.get(encoding)
        if known is None or known[0] != wanted:
            ids = self.unscored
            document, blobs = pack([self.samples[name] for name in ids], ids, encoding=encoding, rewards=rewards)
            known = wanted, *encode_body(document, blobs, "multipart")
            self.bodies[encoding] = known
        return known[1], known[2]


@dataclass(slots=True)
class RetryBudget:
    """Limits retries to a share of the first ones, plus a fixed rate.

    ``share``: retries per first request. ``per_second``: further retries per second. ``max_saved``: the largest number of unused
    retries that are kept for later. Without this budget, clients would multiply the load of servers that
    are already overloaded. Source: Beyer et al., "Site Reliability Engineering" (2016), chapter "Handling Overload".
    """

    share: float
    per_second: float
    max_saved: float
    saved: float = field(init=False)
    counted_until: float | None = field(default=None)

    def __post_init__(self) -> None:
        self.saved = self.max_saved

    def first_request(self) -> None:
        """Count a first request."""
        self.saved = min(self.max_saved, self.saved + self.share)

    def take(self, now: float) -> bool:
        """Whether one retry may be made now; if so, it is counted."""
        if self.counted_until is not None:
            self.saved = min(self.max_saved, self.saved + (now - self.counted_until) * self.per_second)
        self.counted_until = now
        if self.saved < 1:
            return False
        self.saved -= 1
        return True


class Session:
    """The state of a client, created and used on one event loop.

    ``faults``: number of failed attempts by kind. ``calls``: number of all attempts.
    """

    def __init__(self, settings: RemoteSettings, expected: ExpectedReply, quota: Quota | None) -> None:
        self.faults: Counter[str] = Counter()
        self.calls = 0
        self._settings, self._expected = settings, expected
        self._pool = EndpointPool(settings.endpoints)
        self._transport = Transport(token=settings.token, connections=settings.concurrency * len(settings.endpoints))
        self._line = ProgressSemaphore(settings.concurrency * len(settings.endpoints), patience=settings.deadline)
        self._retries = RetryBudget(share=settings.retry_share, per_second=10.0, max_saved=20.0)
        self._quota = quota
        self._turns = None if quota is None else Turns(quota)
        self._probing: dict[EndpointState, asyncio.Task[None]] = {}

    async def score(self, chunk: Chunk) -> None:
        """Fill in the chunk's scores. Samples that are unscored at its deadline stay unscored."""
        began = time.monotonic()
        try:
            chunk.expires = await self._line.enter(since=chunk.began)
        except TimeoutError:
            self._out_of_time(chunk, began)
            return
        try:
            async with asyncio.timeout(chunk.expires - time.monotonic()):
                await self._retry_until_scored(chunk)
            chunk.seconds = time.monotonic() - began
        except TimeoutError:
            self._out_of_time(chunk, began)
        finally:
            self._line.leave()

    def _out_of_time(self, chunk: Chunk, began: float) -> None:
        self.faults["out_of_time"] += 1
        chunk.faults.append("out_of_time")
        chunk.seconds = time.monotonic() - began

    async def close(self) -> None:
        """Cancel the probes and close the connections."""
        for probe in self._probing.values():
            probe.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        await self._transport.close()

    async def _retry_until_scored(self, chunk: Chunk) -> None:
        self._retries.first_request()
        failed: list[EndpointState] = []
        attempts = rounds = 0
        while chunk.unscored and attempts < self._settings.attempts:
            if rounds and not self._retries.take(time.monotonic()):
                await asyncio.sleep(_POLL)
                continue
            if not await self._wait_for_quota(chunk, again=rounds > 0):
                return
            endpoint = await self._endpoint(failed)
            rounds += 1
            chunk.attempts = rounds
            try:
                chunk.scores |= await self._ask(endpoint, chunk)
                if not chunk.unscored:
                    return
                attempts += 1
                chunk.faults.append("reward_failed")
            except RequestFault as fault:
                chunk.faults.append(fault.kind)
                if fault.final:
                    return
                attempts += fault.tried
            failed = [*failed, endpoint][-(len(self._settings.endpoints) - 1) :] if len(self._settings.endpoints) > 1 else []
            await asyncio.sleep(_pause(next(iter(chunk.samples)), rounds))

    async def _endpoint(self, avoid: Sequence[EndpointState]) -> EndpointState:
        """Wait until a server is available, and return it."""
        while True:
            self._start_probes()
            endpoint = self._pool.choose(avoid)
            if endpoint is not None:
                return endpoint
            await asyncio.sleep(_POLL)

    async def _ask(self, endpoint: EndpointState, chunk: Chunk) -> dict[str, ItemScores]:
        count = len(chunk.unscored)
        endpoint.in_progress += count  # before the first wait, so that the next choice of a server includes it
        self.calls += 1
        try:
            return await self._exchange(endpoint, chunk)
        finally:
            endpoint.in_progress -= count

    async def _exchange(self, endpoint: EndpointState, chunk: Chunk) -> dict[str, ItemScores]:
        ids, settings = chunk.unscored, self._settings
        patience = _PATIENCE * min(settings.timeout, settings.deadline)
        started = math.inf
        try:
            encoding: ImageEncoding = ("raw" if endpoint.local else "webp") if settings.encoding == "auto" else settings.encoding
            body, kind = await asyncio.to_thread(chunk.body, encoding, settings.rewards)
            started = time.monotonic()
            seconds = max(0.001, min(settings.timeout, chunk.expires - started))
            reply = await self._transport.post(f"{endpoint.url}/v1/score", body, kind, seconds=seconds)
            scores = _validated(reply, ids, self._expected)
            self._line.answered()
        except RequestFault as fault:
            self.faults[fault.kind] += 1
            fault.slow = fault.slow and time.monotonic() - started >= patience
            self._pool.failed(endpoint, fault)
            raise
        except asyncio.CancelledError:
            if time.monotonic() - started >= patience:  # the whole chunk is out of time
                self._pool.failed(endpoint, RequestFault("timeout"))
            raise
        if any(each.failed for each in scores.values()):
            self.faults["reward_failed"] += 1
        return scores

    async def _wait_for_quota(self, chunk: Chunk, *, again: bool) -> bool:
        """Wait until the quota allows the unscored samples to be sent. Returns False if the quota is used up or the deadline is
        earlier.

        ``again``: this is a further attempt, which takes another call from the quota.
        """
        if self._quota is None or self._turns is None:
            return True
        if again and not await asyncio.to_thread(self._quota.claim_another):
            self.faults["budget"] += 1
            return False
        if await self._turns.next(len(chunk.unscored), latest=chunk.expires) is None:
            self.faults["rate_limit"] += 1
            return False
        return True

    def _start_probes(self) -> None:
        """Start probes of excluded servers that are due, in the background."""
        for endpoint in self._pool.probes_due():
            if endpoint not in self._probing:
                self._probing[endpoint] = asyncio.create_task(self._probe_one(endpoint))

    async def _probe_one(self, endpoint: EndpointState) -> None:
        try:
            await self._transport.get(f"{endpoint.url}/readyz", seconds=_PROBE_SECONDS)
            info = await read_info(self._transport, endpoint.url, seconds=_PROBE_SECONDS)
            succeeded = judges_of(info, self._settings.rewards) == self._expected.judges
            if not succeeded:
                _LOG.warning("%s has other rewards than at the start of this run; it is not used", endpoint.url)
        except RequestFault:
            succeeded = False
        self._pool.probed(endpoint, succeeded=succeeded)
        del self._probing[endpoint]


def _validated(reply: bytes, ids: Sequence[str], expected: ExpectedReply) -> dict[str, ItemScores]:
    try:
        return read_reply(reply, ids, expected)
    except InvalidReply as error:
        raise RequestFault(str(error)) from None


def _pause(key: str, rounds: int) -> float:
    """Seconds to wait: uniform from 0 to a limit that doubles each round (exponential backoff with full jitter)."""
    draw = torch.rand((), generator=generator("remote", "pause", key, rounds)).item()
    return draw * min(_MAX_PAUSE, _FIRST_PAUSE * 2.0 ** min(rounds, 16))
