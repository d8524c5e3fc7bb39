"""Batches of samples of all callers: samples wait in one queue, and the reward runs in its own thread, not on the event loop.

While the reward runs, samples collect for the next batch. All state belongs to the event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from retouch.protocols import Reward
from retouch.rewards.scoring import ask
from retouch.types import Sample, Scores
from retouch_serve.server.hosted_rewards import HostedReward
from retouch_serve.server.metrics import Metrics
from retouch_serve.server.request_bodies import Limits
from retouch_serve.server.scoring import SampleResult, score_samples
from retouch_serve.wire.errors import RequestError

_WAIT_SHARE = 0.2  # fraction of the last call's time for which to wait for more samples
_FIRST_WAIT, _MAX_WAIT = 0.02, 0.1
_POLL = 0.001
_FAR_LONGER = 4.0  # a call is stalled after this multiple of the longest recent call
_FORGET = 0.9  # factor by which the longest recent call decays with each call


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

    def add(self, row: int, result: SampleResult, fingerprint: str) -> None:
        self.rows[row] = result
        self.fingerprints[fingerprint] = None
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(RewardResult(tuple(row for row in self.rows if row is not None), tuple(self.fingerprints)))


class Batcher:
    """One reward's queue and thread. ``hosted`` may be replaced at any time; a batch uses the reward that is set when it starts.

    ``arriving``: returns the number of requests that are being received or decoded.
    """

    def __init__(self, hosted: HostedReward, limits: Limits, metrics: Metrics, *, arriving: Callable[[], int]) -> None:
        self.hosted = hosted
        self._arriving = arriving
        self._limits, self._metrics = limits, metrics
        self._queue: deque[tuple[_Request, int, Sample]] = deque()
        self._in_progress = 0
        self._max_wait = _FIRST_WAIT
        self._callers = 0
        # The reward's thread writes this value, which shows its progress, and the event loop reads it.
        self._call_began: float | None = None
        self._expired: float | None = None
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
        """Queue the samples. Samples that are still queued at ``expires`` (``time.monotonic``) are not scored.

        Raises RequestError ("busy") if the queue has no room.
        """
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
            await self._wait_for_more()
            await self._score(self._next_batch())  # a local variable would keep the images alive until the next batch

    @property
    def call_seconds(self) -> float:
        """The time in seconds for which the current call of the reward has been running; 0 between two calls."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def stalled(self) -> bool:
        """Whether the current call takes far longer than recent calls, and a request has missed its deadline since it began."""
        began, expired = self._call_began, self._expired
        if began is None or expired is None or expired < began:
            return False
        return time.monotonic() - began > max(self._limits.stall_seconds, _FAR_LONGER * self._usual_seconds)

    def expired(self) -> None:
        """Record that a request that waits for this reward has missed its deadline."""
        self._expired = time.monotonic()

    def _timed(self, reward: Reward, samples: Sequence[Sample]) -> Scores:
        self._call_began = time.monotonic()
        try:
            return ask(reward, samples)
        finally:
            seconds = time.monotonic() - self._call_began
            self._usual_seconds = max(seconds, _FORGET * self._usual_seconds)
            self._call_began = None

    def close(self) -> None:
        """Stop the threads without waiting for a call in progress."""
        self._checks.shutdown(wait=False, cancel_futures=True)
        self._reward.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_more(self) -> None:
        """Wait for more samples: always for ``window``, and up to a fifth of the last call's time while more requests are expected.

        Callers that got their replies together send their next requests together. A batch without some of these requests would
        delay them by a whole call.
        """
        began = time.monotonic()
        while len(self._queue) < self._limits.max_batch:
            waited = time.monotonic() - began
            more = self._arriving() or len({id(request) for request, _, _ in self._queue}) < self._callers
            if waited >= self._limits.window and not (more and waited < self._max_wait):
                return
            await asyncio.sleep(_POLL)

    def _next_batch(self) -> list[tuple[_Request, int, Sample]]:
        """Take the next batch from the queue, without samples of requests that are cancelled or expired."""
        batch: list[tuple[_Request, int, Sample]] = []
        now = time.monotonic()
        while self._queue and len(batch) < self._limits.max_batch:
            request, row, sample = self._queue.popleft()
            if request.done.done():
                continue
            if request.expires <= now:
                request.done.set_exception(RequestError("deadline"))
                continue
            batch.append((request, row, sample))
        if not self._queue:
            self._not_empty.clear()
        self._in_progress = len(batch)
        self._update_metric()
        return batch

    async def _score(self, batch: Sequence[tuple[_Request, int, Sample]]) -> None:
        if not batch:
            return
        hosted, started = self.hosted, time.monotonic()
        self._metrics.batches.labels(hosted.name).observe(len(batch))
        samples = [sample for _, _, sample in batch]
        loop = asyncio.get_running_loop()

        def call(given: Sequence[Sample]) -> Future[Scores]:
            return self._reward.submit(self._timed, hosted.reward, given)

        results = await loop.run_in_executor(self._checks, partial(score_samples, hosted, samples, call=call))
        seconds = time.monotonic() - started
        self._metrics.scoring.labels(hosted.name).observe(seconds)
        self._max_wait = min(_MAX_WAIT, _WAIT_SHARE * seconds)
        self._callers = len({id(request) for request, _, _ in [*batch, *self._queue]})
        for (request, row, _), result in zip(batch, results, strict=True):
            self._metrics.items.labels(hosted.name, result if isinstance(result, str) else "scored").inc()
            request.add(row, result, hosted.fingerprint)
        self._in_progress = 0
        self._update_metric()

    def _update_metric(self) -> None:
        self._metrics.waiting.labels(self.hosted.name).set(self.load)
