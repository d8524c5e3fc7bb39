"""Batches over all callers: samples wait in one queue, and the reward works on a thread of its own, off the event loop.

While the reward works, the next batch gathers. All state is touched from the event loop alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from retouch.rewards.wire.refusals import Refused
from retouch.serving.hosted import Hosted
from retouch.serving.judging import Verdict, judge
from retouch.serving.limits import Limits
from retouch.serving.metrics import Metrics
from retouch.types import Sample, Scores

_PATIENCE = 0.1
_LONGEST_PATIENCE = 0.05


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
    """One reward's queue and thread. ``hosted`` may be replaced at any time: a batch is judged by what was there at its start."""

    def __init__(self, hosted: Hosted, limits: Limits, metrics: Metrics) -> None:
        self.hosted = hosted
        self._limits, self._metrics = limits, metrics
        self._queue: deque[tuple[_Ticket, int, Sample]] = deque()
        self._working = 0
        self._patience = 0.0
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

    async def submit(self, samples: Sequence[Sample], *, expires: float) -> Verdicts:
        """Judge, with whatever else is there. Refused ("busy") without room; what would start after ``expires`` is dropped."""
        if not self.room(len(samples)):
            raise Refused("busy")
        if not samples:
            return Verdicts((), (self.hosted.fingerprint,))
        done = asyncio.get_running_loop().create_future()
        ticket = _Ticket([None] * len(samples), expires, done, len(samples))
        self._queue.extend((ticket, row, sample) for row, sample in enumerate(samples))
        self._count()
        self._arrived.set()
        return await ticket.done

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._arrived.wait()
            if len(self._queue) < self._limits.max_batch:
                await asyncio.sleep(max(self._limits.window, self._patience))
            batch = self._take()
            if batch:
                await self._work(batch)

    def close(self) -> None:
        """Let go of the threads; a call that is under way ends by itself."""
        self._judge.shutdown(wait=False, cancel_futures=True)
        self._reward.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> list[tuple[_Ticket, int, Sample]]:
        """The next batch: what nobody waits for any more is left out."""
        batch: list[tuple[_Ticket, int, Sample]] = []
        now = time.monotonic()
        while self._queue and len(batch) < self._limits.max_batch:
            ticket, row, sample = self._queue.popleft()
            if ticket.done.done():
                continue
            if ticket.expires <= now:
                ticket.done.set_exception(Refused("deadline"))
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
        # Callers who were answered just now are back in a moment: without them half of all callers would share each call in turn.
        several = len({id(ticket) for ticket, _, _ in [*batch, *self._queue]}) > 1
        self._patience = min(_LONGEST_PATIENCE, _PATIENCE * seconds) if several else 0.0
        for (ticket, row, _), verdict in zip(batch, verdicts, strict=True):
            self._metrics.items.labels(hosted.name, verdict if isinstance(verdict, str) else "scored").inc()
            ticket.put(row, verdict, hosted.fingerprint)
        self._working = 0
        self._count()

    def _count(self) -> None:
        self._metrics.waiting.labels(self.hosted.name).set(self.load)
