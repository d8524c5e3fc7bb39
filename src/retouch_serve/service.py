"""A reward server without HTTP: it admits requests, collects the samples of all callers in batches, and reloads rewards.

Samples wait in one queue for each reward, and the reward runs in its own thread, not on the event loop. While it runs, samples
collect for the next batch. All state belongs to the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request

from retouch.protocols import Reward
from retouch.rewards.scoring import ask
from retouch.types import Sample, Scores
from retouch_serve.front import Bodies, Body
from retouch_serve.hosted import HostedReward, RewardSpec, SampleResult, rebuild, score_samples
from retouch_serve.requests import Limits, decode
from retouch_serve.wire import SERVICE, ErrorCode, RequestError, ServerInfo

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WAIT_SHARE = 0.2  # fraction of the last call's time for which to wait for more samples
_FIRST_WAIT, _MAX_WAIT = 0.02, 0.1
_POLL = 0.001
_FAR_LONGER = 4.0  # a call is stalled after this multiple of the longest recent call
_FORGET = 0.9  # factor by which the longest recent call decays with each call
_DECODING_THREADS = 4
_TRIM_SECONDS = 0.5
_DRAIN_POLL = 0.02
# Minimum time in seconds for which a draining server still answers, so that clients and load balancers see its errors.
_MIN_DRAIN = 0.2
_LOG = logging.getLogger("retouch.serving")
T = TypeVar("T")


class Metrics:
    """The metrics of one server, in its own registry; durations are in seconds, sizes in samples."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("retouch_requests", "Requests by page and status", ["page", "status"], registry=registry)
        self.seconds = Histogram(
            "retouch_request_seconds", "From a request's headers to its reply", ["page"], buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge("retouch_requests_in_flight", "Requests in progress", registry=registry)
        self.items = Counter("retouch_items", "Items by reward and outcome", ["reward", "outcome"], registry=registry)
        self.waiting = Gauge("retouch_queue_items", "Samples that wait or are being scored", ["reward"], registry=registry)
        self.batches = Histogram(
            "retouch_batch_items", "Samples per call of a reward", ["reward"], buckets=_SIZES, registry=registry
        )
        self.scoring = Histogram(
            "retouch_reward_seconds", "Duration of one call of a reward", ["reward"], buckets=_SECONDS, registry=registry
        )


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One reward's results for a request, in order, and the reward's fingerprint (two if it was reloaded during the request)."""

    rows: tuple[SampleResult, ...]
    fingerprints: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Request:
    """A request in the queue. ``rows``: its results so far; ``missing``: the number of rows without a result (None)."""

    rows: list[SampleResult | None]
    expires: float
    done: "asyncio.Future[RewardResult]"
    missing: int
    fingerprints: dict[str, None] = field(default_factory=dict)


class Batcher:
    """One reward's queue and thread. ``hosted`` may be replaced at any time; a batch uses the reward that is set when it starts.

    ``arriving``: returns the number of requests that are being received or decoded. ``expired``: the last time at which a request
    that waited for this reward missed its deadline.
    """

    def __init__(self, hosted: HostedReward, limits: Limits, metrics: Metrics, *, arriving: Callable[[], int]) -> None:
        self.hosted = hosted
        self.expired: float | None = None
        self._arriving = arriving
        self._limits, self._metrics = limits, metrics
        self._queue: deque[tuple[_Request, int, Sample]] = deque()
        self._in_progress = 0
        self._max_wait = _FIRST_WAIT
        self._callers = 0
        # The reward's thread writes this value, which shows its progress, and the event loop reads it.
        self._call_began: float | None = None
        self._usual_seconds = 0.0  # duration of the longest recent call
        self._not_empty = asyncio.Event()
        # The first executor runs only the reward; the second waits for the result and checks the scores.
        self._reward = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"reward-{hosted.name}")
        self._checks = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"check-{hosted.name}")

    @property
    def load(self) -> int:
        """The number of samples that wait or are being scored."""
        return len(self._queue) + self._in_progress

    def has_room(self, count: int) -> bool:
        """Whether the queue can take ``count`` more samples."""
        return self.load + count <= self._limits.max_queue

    def submit(self, samples: Sequence[Sample], *, expires: float) -> "asyncio.Future[RewardResult]":
        """Queue the samples. Samples that are still queued at ``expires`` (``time.monotonic``) are not scored. Raises RequestError
        ("busy") if the queue has no room."""
        if not self.has_room(len(samples)):
            raise RequestError("busy")
        done: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        if not samples:
            done.set_result(RewardResult((), (self.hosted.fingerprint,)))
            return done
        request = _Request([None] * len(samples), expires, done, len(samples))
        self._queue.extend((request, row, sample) for row, sample in enumerate(samples))
        self._update_metric()
        self._not_empty.set()
        return done

    async def run(self) -> None:
        """Score batches until cancelled."""
        while True:
            await self._not_empty.wait()
            # Wait for more samples: always for ``window``, and up to a fifth of the last call's time while more requests are
            # expected. Callers that got their replies together send their next requests together. A batch without some of these
            # requests would delay them by a whole call.
            began = time.monotonic()
            while len(self._queue) < self._limits.max_batch:
                waited = time.monotonic() - began
                more = self._arriving() or len({id(request) for request, _, _ in self._queue}) < self._callers
                if waited >= self._limits.window and not (more and waited < self._max_wait):
                    break
                await asyncio.sleep(_POLL)
            await self._score_next()  # whose local variables would keep the images alive until the next batch

    @property
    def call_seconds(self) -> float:
        """The time in seconds for which the current call of the reward has been running; 0 between two calls."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def stalled(self) -> bool:
        """Whether the current call takes far longer than recent calls, and a request has missed its deadline since it began."""
        began, expired = self._call_began, self.expired
        if began is None or expired is None or expired < began:
            return False
        return time.monotonic() - began > max(self._limits.stall_seconds, _FAR_LONGER * self._usual_seconds)

    def close(self) -> None:
        """Stop the threads without waiting for a call in progress."""
        self._checks.shutdown(wait=False, cancel_futures=True)
        self._reward.shutdown(wait=False, cancel_futures=True)

    async def _score_next(self) -> None:
        """Score the next batch of the queue, without samples of requests that are cancelled or expired."""
        batch: list[tuple[_Request, int, Sample]] = []
        started = time.monotonic()
        while self._queue and len(batch) < self._limits.max_batch:
            request, row, sample = self._queue.popleft()
            if request.done.done():
                continue
            if request.expires <= started:
                request.done.set_exception(RequestError("deadline"))
                continue
            batch.append((request, row, sample))
        if not self._queue:
            self._not_empty.clear()
        self._in_progress = len(batch)
        self._update_metric()
        if not batch:
            return
        hosted = self.hosted
        self._metrics.batches.labels(hosted.name).observe(len(batch))

        def call(samples: Sequence[Sample]) -> Future[Scores]:
            return self._reward.submit(self._timed, hosted.reward, samples)

        samples = [sample for _, _, sample in batch]
        loop = asyncio.get_running_loop()
        results = await loop.run_in_executor(self._checks, partial(score_samples, hosted, samples, call=call))
        seconds = time.monotonic() - started
        self._metrics.scoring.labels(hosted.name).observe(seconds)
        self._max_wait = min(_MAX_WAIT, _WAIT_SHARE * seconds)
        self._callers = len({id(request) for request, _, _ in [*batch, *self._queue]})
        for (request, row, _), result in zip(batch, results, strict=True):
            self._metrics.items.labels(hosted.name, result if isinstance(result, str) else "scored").inc()
            request.rows[row] = result
            request.fingerprints[hosted.fingerprint] = None
            request.missing -= 1
            if not request.missing and not request.done.done():
                rows = tuple(row for row in request.rows if row is not None)
                request.done.set_result(RewardResult(rows, tuple(request.fingerprints)))
        self._in_progress = 0
        self._update_metric()

    def _timed(self, reward: Reward, samples: Sequence[Sample]) -> Scores:
        self._call_began = time.monotonic()
        try:
            return ask(reward, samples)
        finally:
            seconds = time.monotonic() - self._call_began
            self._usual_seconds = max(seconds, _FORGET * self._usual_seconds)
            self._call_began = None

    def _update_metric(self) -> None:
        self._metrics.waiting.labels(self.hosted.name).set(self.load)


@dataclass(frozen=True, slots=True)
class ItemReply:
    """One item's columns (null: the score is missing), and an error code for each reward that failed on it."""

    id: str
    scores: dict[str, float | None]
    errors: dict[str, ErrorCode]


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """The reply of ``POST /v1/score``. ``judges``: the fingerprint of each reward; two if it was reloaded during the request."""

    judges: dict[str, list[str]]
    items: list[ItemReply]


class Service:
    """The rewards of one server. ``start`` it on a running event loop; only decoding and scoring use other threads."""

    def __init__(self, hosted: Sequence[HostedReward], limits: Limits) -> None:
        self.limits, self.metrics = limits, Metrics()
        self.draining = False
        self._requests = self._arriving = 0
        self._batchers = {each.name: Batcher(each, limits, self.metrics, arriving=lambda: self._arriving) for each in hosted}
        self._tasks: list[asyncio.Task[None]] = []
        self._decoders = ThreadPoolExecutor(max_workers=_DECODING_THREADS, thread_name_prefix="decode")
        self.bodies = Bodies(limits)
        self.memory = self.bodies.memory

    def start(self) -> None:
        """Start the tasks that score and trim memory."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._trim(), *(batcher.run() for batcher in self._batchers.values()))]

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            await asyncio.to_thread(self.memory.trim)

    async def wait_until_failed(self) -> None:
        """Return when a task has ended, which only a bug in this package can cause."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    @property
    def working(self) -> bool:
        """Whether every reward's queue is being processed."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted."""
        batchers = self._batchers.values()
        return self.working and not self.draining and all(batcher.has_room(1) and not batcher.stalled for batcher in batchers)

    @property
    def call_seconds(self) -> float:
        """The time in seconds for which the longest call of a reward has been running; 0 if none is running."""
        return max((batcher.call_seconds for batcher in self._batchers.values()), default=0.0)

    @property
    def stuck(self) -> bool:
        """Whether a call of a reward takes longer than any request may wait, so that only a new process can help."""
        return self.call_seconds > self.limits.deadline_seconds

    @property
    def hosted(self) -> list[HostedReward]:
        """The current rewards; a reload replaces them."""
        return [batcher.hosted for batcher in self._batchers.values()]

    def info(self) -> ServerInfo:
        """The reply of ``GET /v1/info``."""
        rewards = [each.info() for each in self.hosted]
        return ServerInfo(service=SERVICE, version=version("retouch"), rewards=rewards, limits=self.limits.info())

    def admit(self) -> "Admission":
        """Admit a request before its body is read. Raises RequestError if the server is shutting down, full or stalled."""
        if self.draining:
            raise RequestError("draining")
        self.require_room()
        return Admission(self)

    def require_room(self) -> None:
        """Raise RequestError if the server is full or stalled."""
        if self._requests >= self.limits.max_requests or not all(batcher.has_room(1) for batcher in self._batchers.values()):
            raise RequestError("busy")
        if any(batcher.stalled for batcher in self._batchers.values()):
            raise RequestError("stalled")

    async def score(self, body: bytes, content_type: str, *, seconds: float, admission: "Admission") -> ScoreReply:
        """Decode and score a batch. For an item that could not be decoded, every reward gets the item's error code. Raises
        RequestError if the batch is invalid, is too large for the queue, or takes longer than ``seconds``."""
        decoded = await self.decode(partial(decode, content_type=content_type), body, admission=admission)
        del body
        asked = list(self._batchers) if decoded.rewards is None else list(dict.fromkeys(decoded.rewards))
        if not set(asked) <= self._batchers.keys():
            raise RequestError("bad_batch")
        samples = [sample for sample in decoded.samples if isinstance(sample, Sample)]
        results = await self.score_samples(samples, asked, seconds=seconds, admission=admission)
        rows = {name: iter(given.rows) for name, given in results.items()}
        items = []
        for name, decoded_sample in zip(decoded.ids, decoded.samples, strict=True):
            item = ItemReply(name, {}, {})
            for reward, row in rows.items():
                result = next(row) if isinstance(decoded_sample, Sample) else decoded_sample
                if isinstance(result, str):
                    item.errors[reward] = result
                else:
                    item.scores.update(result)
            items.append(item)
        return ScoreReply({name: list(given.fingerprints) for name, given in results.items()}, items)

    async def decode(self, decoder: Callable[..., T], body: bytes, *, admission: "Admission") -> T:
        """Decode a body in another thread, with ``decoder(body, limits=..., memory=...)``. Raises RequestError if this fails."""
        loop = asyncio.get_running_loop()
        with self.memory.holding(3 * len(body)):  # decoded texts and base64 need additional memory
            call = partial(decoder, body, limits=self.limits, memory=self.memory)
            del body
            decoded = await loop.run_in_executor(self._decoders, call)
        admission.release()
        return decoded

    async def score_samples(
        self, samples: Sequence[Sample], asked: Sequence[str], *, seconds: float, admission: "Admission"
    ) -> dict[str, RewardResult]:
        """Return the results of each reward in ``asked``. Raises RequestError if a queue is full, or after ``seconds``."""
        batchers = [self._batchers[name] for name in asked]
        if not all(batcher.has_room(len(samples)) for batcher in batchers):
            raise RequestError("busy")
        expires = time.monotonic() + seconds
        waiting = [batcher.submit(samples, expires=expires) for batcher in batchers]
        admission.arrived()
        try:
            async with asyncio.timeout(seconds):
                results = await asyncio.gather(*waiting)
        except TimeoutError:
            for batcher, future in zip(batchers, waiting, strict=True):
                if not future.done() or future.cancelled():
                    batcher.expired = time.monotonic()
            raise RequestError("deadline") from None
        finally:
            for future in waiting:
                future.cancel()
        return dict(zip(asked, results, strict=True))

    async def reload(self, specs: Sequence[RewardSpec]) -> None:
        """Build every reward again and replace the old one between two batches. If the build fails, the old one stays in use."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload") as pool:
            for spec in specs:
                batcher = self._batchers[spec.name]
                future = pool.submit(rebuild, spec, batcher.hosted)
                await asyncio.wait([asyncio.wrap_future(future)])
                error = future.exception()
                if error is not None:
                    _LOG.error("reloading %s failed; the old reward stays in use", spec.name, exc_info=error)
                    continue
                batcher.hosted = future.result()
                _LOG.warning("reloaded %s, fingerprint %s", spec.name, batcher.hosted.fingerprint)

    async def drain(self) -> None:
        """Refuse new requests, and wait for the requests in progress, at most ``drain_seconds``."""
        self.draining = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        # A request that arrives slowly is not waited for.
        while loop.time() < began + _MIN_DRAIN or (
            self._requests + self._arriving and loop.time() < began + self.limits.drain_seconds
        ):
            await asyncio.sleep(_DRAIN_POLL)

    async def close(self) -> None:
        """Stop scoring."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for batcher in self._batchers.values():
            batcher.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)


class Admission(Body):
    """A request, for the duration of a ``with`` block. It is in progress after its body has arrived.

    It counts as arriving until its samples are in the queues, but not while its body arrives slowly.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service.bodies)
        self._service = service
        self._arriving = self._in_progress = False

    def __enter__(self) -> "Admission":
        self._service._arriving += 1
        self._arriving = True
        return self

    def __exit__(self, *error: object) -> None:
        self.arrived()
        self.release()
        self._service._requests -= self._in_progress

    async def receive(self, request: Request) -> bytes:
        """Read the body. Raises RequestError if it cannot be read, or if the server is full now."""
        body = await self.read(request, max_bytes=self._service.limits.max_body_bytes)
        self._service.require_room()
        self._service._requests += 1
        self._in_progress = True
        return body

    def becomes_slow(self, deadline: asyncio.Timeout) -> None:
        super().becomes_slow(deadline)
        self.arrived()

    def arrived(self) -> None:
        """Record that the request's samples are in the rewards' queues."""
        self._service._arriving -= self._arriving
        self._arriving = False
