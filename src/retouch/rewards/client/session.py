"""What a client keeps on the event loop: connections, the pool, budgets; and how one chunk of samples gets its answers."""

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from retouch.core.random import generator
from retouch.rewards.client.budget import Budget
from retouch.rewards.client.discovery import judges_of, read_info
from retouch.rewards.client.faults import Fault
from retouch.rewards.client.line import Line
from retouch.rewards.client.pool import Endpoint, Pool
from retouch.rewards.client.settings import Settings
from retouch.rewards.client.transport import Transport
from retouch.rewards.quota.quota import Quota, Turns
from retouch.rewards.wire.bodies import encode_body
from retouch.rewards.wire.packing import ImageEncoding, pack
from retouch.rewards.wire.replies import ExpectedReply, InvalidReply, ItemScores, read_reply
from retouch.types import Sample

_LOG = logging.getLogger("retouch.rewards")
_PROBE_SECONDS = 2.0
_POLL = 0.02
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
_KNOWN_TIMES, _ENOUGH_TIMES = 200, 20


@dataclass(slots=True, eq=False)
class Chunk:
    """Samples that are sent together, by id, and what is known of them. ``begun`` and ``expires``: times of ``time.monotonic``.
    ``faults``: why attempts failed, in order; ``seconds``: all of them took, with waiting.
    """

    samples: dict[str, Sample]
    begun: float
    expires: float = 0.0
    answers: dict[str, ItemScores] = field(default_factory=dict)
    bodies: dict[ImageEncoding, tuple[frozenset[str], bytes, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample], begun: float) -> "Chunk":
        name = secrets.token_hex(6)
        return cls({f"{name}-{number}": sample for number, sample in enumerate(samples)}, begun)

    @property
    def open(self) -> list[str]:
        """Ids without an answer, or of which a reward failed."""
        return [name for name in self.samples if name not in self.answers or self.answers[name].failed]

    def body(self, encoding: ImageEncoding, rewards: Sequence[str] | None) -> tuple[bytes, str]:
        """The request for what is open, made once for each encoding."""
        wanted = frozenset(self.open)
        known = self.bodies.get(encoding)
        if known is None or known[0] != wanted:
            ids = self.open
            document, blobs = pack([self.samples[name] for name in ids], ids, encoding=encoding, rewards=rewards)
            known = wanted, *encode_body(document, blobs, "multipart")
            self.bodies[encoding] = known
        return known[1], known[2]


class Session:
    """Made and used on one event loop. ``faults`` counts failed attempts by kind, ``calls`` all of them."""

    def __init__(self, settings: Settings, expected: ExpectedReply, quota: Quota | None) -> None:
        self.faults: Counter[str] = Counter()
        self.calls = self.hedges = 0
        self._settings, self._expected = settings, expected
        self._pool = Pool(settings.endpoints)
        self._transport = Transport(token=settings.token, connections=settings.concurrency * len(settings.endpoints))
        self._line = Line(settings.concurrency * len(settings.endpoints), patience=settings.deadline)
        self._retries = Budget(share=settings.retry_share, floor=10.0, most=20.0)
        self._hedging = Budget(share=settings.hedge_share, floor=0.0, most=5.0)
        self._times: deque[float] = deque(maxlen=_KNOWN_TIMES)
        self._quota = quota
        self._turns = None if quota is None else Turns(quota)
        self._probing: dict[Endpoint, asyncio.Task[None]] = {}

    async def score(self, chunk: Chunk) -> None:
        """Fill in the chunk's answers; what is open when its time is over stays open."""
        began = time.monotonic()
        try:
            chunk.expires = await self._line.enter(since=chunk.begun)
        except TimeoutError:
            self._out_of_time(chunk, began)
            return
        try:
            async with asyncio.timeout(chunk.expires - time.monotonic()):
                await self._until_done(chunk)
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
        """End the probes and the connections."""
        for probe in self._probing.values():
            probe.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        await self._transport.close()

    async def _until_done(self, chunk: Chunk) -> None:
        self._retries.first()
        self._hedging.first()
        failed: list[Endpoint] = []
        attempts = rounds = 0
        while chunk.open and attempts < self._settings.attempts:
            if rounds and not self._retries.take(time.monotonic()):
                await asyncio.sleep(_POLL)
                continue
            if not await self._may_ask(chunk, again=rounds > 0):
                return
            endpoint = await self._endpoint(failed)
            rounds += 1
            chunk.attempts = rounds
            try:
                chunk.answers |= await self._ask(endpoint, chunk)
                if not chunk.open:
                    return
                attempts += 1
                chunk.faults.append("reward_failed")
            except Fault as fault:
                chunk.faults.append(fault.kind)
                if fault.final:
                    return
                attempts += fault.tried
            failed = [*failed, endpoint][-(len(self._settings.endpoints) - 1) :] if len(self._settings.endpoints) > 1 else []
            await asyncio.sleep(_pause(next(iter(chunk.samples)), rounds))

    async def _endpoint(self, avoid: Sequence[Endpoint]) -> Endpoint:
        """Whom to ask, as soon as there is one."""
        while True:
            self._probe()
            endpoint = self._pool.choose(avoid)
            if endpoint is not None:
                return endpoint
            await asyncio.sleep(_POLL)

    async def _ask(self, endpoint: Endpoint, chunk: Chunk) -> dict[str, ItemScores]:
        """The endpoint's answers, or those of another one that is asked as well when this one takes unusually long."""
        first = self._begin(endpoint, chunk)
        running = {first}
        try:
            patience = self._patience()
            if patience is not None:
                await asyncio.wait(running, timeout=patience)
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

    def _begin(self, endpoint: Endpoint, chunk: Chunk) -> "asyncio.Task[dict[str, ItemScores]]":
        """Ask, and count it at once, so that the next request sees it."""
        count = len(chunk.open)
        endpoint.in_hand += count
        self.calls += 1

        def ended(task: "asyncio.Task[dict[str, ItemScores]]") -> None:
            endpoint.in_hand -= count

        task = asyncio.create_task(self._exchange(endpoint, chunk))
        task.add_done_callback(ended)
        return task

    async def _exchange(self, endpoint: Endpoint, chunk: Chunk) -> dict[str, ItemScores]:
        ids, settings = chunk.open, self._settings
        try:
            encoding: ImageEncoding = ("raw" if endpoint.local else "webp") if settings.encoding == "auto" else settings.encoding
            body, kind = await asyncio.to_thread(chunk.body, encoding, settings.rewards)
            started = time.monotonic()
            seconds = max(0.001, min(settings.timeout, chunk.expires - started))
            reply = await self._transport.post(f"{endpoint.url}/v1/score", body, kind, seconds=seconds)
            answers = _believed(reply, ids, self._expected)
            self._times.append(time.monotonic() - started)
            self._line.answered()
        except Fault as fault:
            self.faults[fault.kind] += 1
            self._pool.failed(endpoint, fault)
            raise
        if any(answer.failed for answer in answers.values()):
            self.faults["reward_failed"] += 1
        self._pool.succeeded(endpoint)
        return answers

    async def _may_ask(self, chunk: Chunk, *, again: bool) -> bool:
        """Wait for the turn of what is open under the quota, at each attempt anew; False where it will not come in time."""
        if self._quota is None or self._turns is None:
            return True
        if again and not await asyncio.to_thread(self._quota.claim_another):
            self.faults["budget"] += 1
            return False
        if await self._turns.next(len(chunk.open), latest=chunk.expires) is None:
            self.faults["rate_limit"] += 1
            return False
        return True

    def _may_hedge(self, chunk: Chunk) -> bool:
        """Whether a second endpoint may be asked at once."""
        if not self._hedging.take(time.monotonic()):
            return False
        return self._quota is None or (self._quota.turn(len(chunk.open)).wait == 0 and self._quota.claim_another())

    def _patience(self) -> float | None:
        """Seconds after which to ask another endpoint too: the 95th percentile of late; None where that is not wanted or known."""
        if not self._settings.hedge or len(self._times) < _ENOUGH_TIMES:
            return None
        return sorted(self._times)[int(0.95 * len(self._times))]

    def _probe(self) -> None:
        """Try endpoints that were left alone for long enough, beside the requests."""
        for endpoint in self._pool.due():
            if endpoint not in self._probing:
                self._probing[endpoint] = asyncio.create_task(self._probe_one(endpoint))

    async def _probe_one(self, endpoint: Endpoint) -> None:
        try:
            info = await read_info(self._transport, endpoint.url, seconds=_PROBE_SECONDS)
            well = judges_of(info, self._settings.rewards) == self._expected.judges
            if not well:
                _LOG.warning("%s judges by something else than when this run began; it is not asked", endpoint.url)
        except Fault:
            well = False
        self._pool.probed(endpoint, well=well)
        del self._probing[endpoint]


def _believed(reply: bytes, ids: Sequence[str], expected: ExpectedReply) -> dict[str, ItemScores]:
    try:
        return read_reply(reply, ids, expected)
    except InvalidReply as bad:
        raise Fault(str(bad)) from None


def _pause(key: str, rounds: int) -> float:
    """Uniform between 0 and twice as much each time (full jitter)."""
    draw = torch.rand((), generator=generator("remote", "pause", key, rounds)).item()
    return draw * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(rounds, 16))
