"""The state of a client on the event loop (connections, servers, budgets), and the scoring of one chunk of samples, with
retries."""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from retouch.core.random import generator
from retouch.rewards.client.discovery import judges_of, read_info
from retouch.rewards.client.overload import RetryBudget
from retouch.rewards.client.pool import EndpointPool, EndpointState
from retouch.rewards.client.settings import RemoteSettings
from retouch.rewards.client.transport import RequestFault, Transport
from retouch.rewards.quota.progress_semaphore import ProgressSemaphore
from retouch.rewards.quota.quota import Quota, Turns
from retouch.rewards.wire.bodies import encode_body
from retouch.rewards.wire.packing import ImageEncoding, pack
from retouch.rewards.wire.replies import ExpectedReply, InvalidReply, ItemScores, read_reply
from retouch.types import Sample

_LOG = logging.getLogger("retouch.rewards")
_PROBE_SECONDS = 2.0
_PATIENCE = 0.5  # share of the time limit; a request that ends earlier without a reply says nothing about its server
_POLL = 0.02
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 2.0  # seconds between attempts
_LATENCIES, _MIN_LATENCIES = 200, 20  # number of latest requests that decide when to hedge


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


class Session:
    """The state of a client, created and used on one event loop.

    ``faults``: number of failed attempts by kind. ``calls``: number of all attempts. ``hedges``: number of second requests.
    """

    def __init__(self, settings: RemoteSettings, expected: ExpectedReply, quota: Quota | None) -> None:
        self.faults: Counter[str] = Counter()
        self.calls = self.hedges = 0
        self._settings, self._expected = settings, expected
        self._pool = EndpointPool(settings.endpoints)
        self._transport = Transport(token=settings.token, connections=settings.concurrency * len(settings.endpoints))
        self._line = ProgressSemaphore(settings.concurrency * len(settings.endpoints), patience=settings.deadline)
        self._retries = RetryBudget(share=settings.retry_share, per_second=10.0, max_saved=20.0)
        self._hedging = RetryBudget(share=settings.hedge_share, per_second=0.0, max_saved=5.0)
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
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
        self._hedging.first_request()
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
        """The scores of the first valid reply: of this server, or of a second one that is asked too if this server is slow (a
        hedge)."""
        first = self._begin(endpoint, chunk)
        running = {first}
        try:
            hedge_after = self._hedge_after()
            if hedge_after is not None:
                await asyncio.wait(running, timeout=hedge_after)
                other = None if first.done() else self._pool.choose([endpoint])
                if other is not None and other is not endpoint and self._may_hedge(chunk):
                    self.hedges += 1
                    running.add(self._begin(other, chunk))
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if good or not running:
                    return (good or list(done))[0].result()
        finally:
            for task in running:
                task.cancel()

    def _begin(self, endpoint: EndpointState, chunk: Chunk) -> "asyncio.Task[dict[str, ItemScores]]":
        """Send the request. Its samples are counted as in progress immediately, so that the next choice of a server includes
        them."""
        count = len(chunk.unscored)
        endpoint.in_progress += count
        self.calls += 1

        def ended(task: "asyncio.Task[dict[str, ItemScores]]") -> None:
            endpoint.in_progress -= count

        task = asyncio.create_task(self._exchange(endpoint, chunk))
        task.add_done_callback(ended)
        return task

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
            self._latencies.append(time.monotonic() - started)
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
        self._pool.succeeded(endpoint)
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

    def _may_hedge(self, chunk: Chunk) -> bool:
        """Whether a second server may be asked now."""
        if not self._hedging.take(time.monotonic()):
            return False
        return self._quota is None or (self._quota.turn(len(chunk.unscored)).wait == 0 and self._quota.claim_another())

    def _hedge_after(self) -> float | None:
        """Seconds after which a second server is asked: the 95th percentile of recent requests. None if hedging is off or there are
        too few requests."""
        if not self._settings.hedge or len(self._latencies) < _MIN_LATENCIES:
            return None
        return sorted(self._latencies)[int(0.95 * len(self._latencies))]

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
