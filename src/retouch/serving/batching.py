"""Batches over all callers: samples wait in one queue, and the reward works on a thread of its own, off the event loop.

While the reward works, the next batch gathers. All state is touched from the event loop alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from retouch.rewards.wire.errors import RequestError
from retouch.serving.hosted import Hosted
from retouch.serving.judging import Verdict, judge
from retouch.serving.limits import Limits
from retouch.serving.metrics import Metrics
from retouch.types import Sample, Scores

_PATIENCE = 0.2
_FIRST_PATIENCE, _LONGEST_PATIENCE = 0.02, 0.1
_POLL = 0.001


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A request's verdicts in order, and the fingerprints of the rewards that gave them (two where one was swapped between)."""

    rows: tuple[Verdict, ...]
    fingerprints: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Ticket:
    """One request in the queue."""

    rows: list[Verdict | None]
    expires: float
    done: "asyncio.Future[Verdicts]"
    left: int
    fingerprints: dict[str, None] = field(default_factory=dict)

    def put(self, row: int, verdict: Verdict, fingerprint: str) -> None:
        self.rows[row] = verdict
        self.fingerprints[fingerprint] = None
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(Verdicts(tuple(row for row in self.rows if row is not None), tuple(self.fingerprints)))


class Batcher:
    """One reward's queue and thread. ``hosted`` may be replaced at any time: a batch is judged by what was there at its start.

    ``coming``: how many requests are being received or decoded.
    """

    def __init__(self, hosted: Hosted, limits: Limits, metrics: Metrics, *, coming: Callable[[], int]) -> None:
        self.hosted = hosted
        self._coming = coming
        self._limits, self._metrics = limits, metrics
        self._queue: deque[tuple[_Ticket, int, Sample]] = deque()
        self._working = 0
        self._patience = _FIRST_PATIENCE
        self._callers = 0
        self._arrived = asyncio.Event()
        # The first runs the reward and nothing else; the second waits for it and takes its answer apart.
        self._reward = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"reward-{hosted.name}")
        self._judge = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"judge-{hosted.name}")

    @property
    def load(self) -> int:
        """Samples that wait or are being judged."""
        return len(self._queue) + self._working

    def room(self, count: int) -> bool:
        """Whether so many samples more may come."""
        return self.load + count <= self._limits.max_queue

    def submit(self, samples: Sequence[Sample], *, expires: float) -> "asyncio.Future[Verdicts]":
        """Judge, with whatever else is there. RequestError ("busy") without room; what would start after ``expires`` is dropped."""
        if not self.room(len(samples)):
            raise RequestError("busy")
        done: asyncio.Future[Verdicts] = asyncio.get_running_loop().create_future()
        if not samples:
            done.set_result(Verdicts((), (self.hosted.fingerprint,)))
            return done
        ticket = _Ticket([None] * len(samples), expires, done, len(samples))
        self._queue.extend((ticket, row, sample) for row, sample in enumerate(samples))
        self._count()
        self._arrived.set()
        return done

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._arrived.wait()
            await self._gather()
            batch = self._take()
            if batch:
                await self._work(batch)

    def close(self) -> None:
        """Let go of the threads; a call that is under way ends by itself."""
        self._judge.shutdown(wait=False, cancel_futures=True)
        self._reward.shutdown(wait=False, cancel_futures=True)

    async def _gather(self) -> None:
        """Wait for more: a little in any case, and a fifth of the last call while others are at the door or are expected back.

        Callers who were answered together come back together; a call without some of them would make these wait for the next.
        """
        begun = time.monotonic()
        while len(self._queue) < self._limits.max_batch:
            waited = time.monotonic() - begun
            more = self._coming() or len({id(ticket) for ticket, _, _ in self._queue}) < self._callers
            if waited >= self._limits.window and not (more and waited < self._patience):
                return
            await asyncio.sleep(_POLL)

    def _take(self) -> list[tuple[_Ticket, int, Sample]]:
        """The next batch: what nobody waits for any more is left out."""
        batch: list[tuple[_Ticket, int, Sample]] = []
        now = time.monotonic()
        while self._queue and len(batch) < self._limits.max_batch:
            ticket, row, sample = self._queue.popleft()
            if ticket.done.done():
                continue
            if ticket.expires <= now:
                ticket.done.set_exception(RequestError("deadline"))
                continue
            batch.append((ticket, row, sample))
        if not self._queue:
            self._arrived.clear()
        self._working = len(batch)
        self._count()
        return batch

    async def _work(self, batch: Sequence[tuple[_Ticket, int, Sample]]) -> None:
        hosted, started = self.hosted, time.monotonic()
        self._metrics.batches.labels(hosted.name).observe(len(batch))
        samples = [sample for _, _, sample in batch]
        loop = asyncio.get_running_loop()

        def call(given: Sequence[Sample]) -> Future[Scores]:
            return self._reward.submit(hosted.reward, given)

        verdicts = await loop.run_in_executor(self._judge, partial(judge, hosted, samples, call=call))
        seconds = time.monotonic() - started
        self._metrics.judging.labels(hosted.name).observe(seconds)
        self._patience = min(_LONGEST_PATIENCE, _PATIENCE * seconds)
        self._callers = len({id(ticket) for ticket, _, _ in [*batch, *self._queue]})
        for (ticket, row, _), verdict in zip(batch, verdicts, strict=True):
            self._metrics.items.labels(hosted.name, verdict if isinstance(verdict, str) else "scored").inc()
            ticket.put(row, verdict, hosted.fingerprint)
        self._working = 0
        self._count()

    def _count(self) -> None:
        self._metrics.waiting.labels(self.hosted.name).set(self.load)
