"""Limits on the requests to judges and reward servers: per minute, and in total; and the event loop of their clients.

All processes of a machine that use the same file share one quota. A run on several machines has one file on each machine, with the
share of the ranks on that machine; without a file, each rank has its own share. A caller first claims all its calls from the total
budget, and the run ends if the budget is too small (``BudgetSpent``); then each request waits for the rate limit.

The rate limit holds in each interval of 60 seconds, for requests that take different amounts. Requests start at an even pace,
slightly below the limit, based on the average amount that a request has taken so far. In addition, the amounts of the requests of
the last minute are counted for each second: a request counts with its largest possible amount until its actual amount is known. A
request that could exceed the limit does not start.
"""

import asyncio
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from retouch.records import files
from retouch.rewards.base import BudgetSpent

_MINUTE = 60
_SECONDS = 64  # counted seconds: the last minute, the current second, and some spare seconds
_PACE = 0.96  # share of the limit; the rest is for requests that a busy machine sends up to a second late
_CATCH_UP = 1.0  # seconds of delay that later requests may make up for
# Seconds. One request moves the next start by at most 63 s, so a start time further in the future than this was stored before a
# reboot, after which the clock starts again, and is ignored; the counted amounts still enforce the limit.
_MAX_AHEAD = 300.0
_WEIGHT = 0.1  # weight of the latest request in the moving average

NUMBERS = 2 + 2 * _SECONDS
"""How many numbers the state of a rate has: the next start time, the average amount, and the time and amount of each counted
second."""


@dataclass(frozen=True, slots=True)
class MinuteRate:
    """At most ``per_minute`` units in any 60 seconds. The state is ``NUMBERS`` numbers of a list, starting at index ``at``,
    initially 0. All times are in seconds of one clock."""

    per_minute: float
    at: int = 0

    def wait(self, numbers: Sequence[float], now: float, most: float) -> float:
        """Seconds until a request of at most ``most`` units may start; 0 if it may start now."""
        start = self._next_start(numbers, now)
        counted = [(numbers[index], numbers[index + 1]) for index in self._indices() if now - 1 - _MINUTE < numbers[index] <= now]
        total = sum(amount for _, amount in counted)
        for second, amount in sorted(counted):
            if total + most <= self.per_minute:
                break
            total -= amount
            start = max(start, second + 1 + _MINUTE)
        return max(0.0, start - now)

    def start(self, numbers: list[float], now: float, most: float) -> float:
        """Count a request that starts now. Returns the amount that it is expected to take, for ``settle``."""
        expected = min(most, numbers[self.at + 1] or most)
        numbers[self.at] = max(self._next_start(numbers, now), now - _CATCH_UP) + self._seconds(expected)
        index = self._index(now)
        if numbers[index] != int(now):
            numbers[index : index + 2] = int(now), 0.0
        numbers[index + 1] += most
        return expected

    def settle(self, numbers: list[float], started: float, *, most: float, expected: float, used: float) -> None:
        """Correct the count of the request that started at ``started``, after it took ``used`` units."""
        numbers[self.at] += self._seconds(used - expected)
        average = numbers[self.at + 1] or most
        numbers[self.at + 1] = average + _WEIGHT * (used - average)
        index = self._index(started)
        if numbers[index] == int(started):
            numbers[index + 1] += used - most

    def _next_start(self, numbers: Sequence[float], now: float) -> float:
        return numbers[self.at] if numbers[self.at] < now + _MAX_AHEAD else 0.0

    def _seconds(self, units: float) -> float:
        return units * _MINUTE / (_PACE * self.per_minute)

    def _indices(self) -> range:
        return range(self.at + 2, self.at + NUMBERS, 2)

    def _index(self, time: float) -> int:
        """The index of the second of this time in the state: the index holds the time, the next index the amount."""
        return self._indices()[int(time) % _SECONDS]


class SharedNumbers:
    """``count`` float64 numbers, initially 0.

    ``file``: shared by all processes of the machine that use the same file, and kept after they end; None keeps the numbers in
    memory. The file must be on a local disk, because it is locked. Raises ValueError if the file has another content.
    """

    def __init__(self, count: int, *, file: Path | None) -> None:
        self._format = struct.Struct(f"<{count}d")
        self._file = file
        self._in_memory = [0.0] * count
        self._lock = threading.Lock()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[list[float]]:
        """Exclusive access to the numbers. Changes are stored when the block ends, unless the block raises."""
        with self._lock:
            if self._file is None:
                numbers = list(self._in_memory)
                yield numbers
                self._in_memory = numbers
                return
            with files.locked(self._file) as descriptor:
                stored = os.pread(descriptor, self._format.size + 1, 0) or bytes(self._format.size)  # a new file: zeros
                if len(stored) != self._format.size:
                    raise ValueError(f"{self._file} is not a quota file; give another file, or remove it")
                numbers = list(self._format.unpack(stored))
                yield numbers
                os.pwrite(descriptor, self._format.pack(*numbers), 0)


_CALLS, _COST, _TOTALS = 0, 1, 2


class Turn(NamedTuple):
    """The result of ``Quota.turn``. ``wait``: seconds from ``now`` until the next try; 0 if the request has started, with
    ``expected`` units counted for it."""

    wait: float
    now: float
    expected: float = 0.0


class Quota:
    """The limits of one judge or one set of servers; None means no limit. May be used from several threads.

    ``units_per_minute``: tokens or samples; one request takes at most ``largest`` units. ``calls``: requests in total, including
    retries. ``cost``: money in total, in the currency of the prices; requests that are in progress when it is spent still cost
    money.

    ``file``: on a local disk, shared by the ranks of a machine; totals accumulate over runs. Each file, or each rank without a
    file, has its share of the limits; the shares of ``calls`` are whole numbers that sum to it. ``clock``: returns seconds. Raises
    ValueError if a limit is not above 0 or not finite, if ``calls`` is too small for a call of each share, or if a limit per minute
    is too small for a single request.
    """

    def __init__(
        self,
        *,
        requests_per_minute: float | None = None,
        units_per_minute: float | None = None,
        largest: float = 1.0,
        calls: int | None = None,
        cost: float | None = None,
        file: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = {"requests_per_minute": requests_per_minute, "units_per_minute": units_per_minute, "calls": calls, "cost": cost}
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"{name} is {limit}; give a finite limit above 0, or none")
        # The ranks that have one share: this rank alone, or those of this machine.
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        first, count = rank, 1
        if file is not None:
            first -= int(os.environ.get("LOCAL_RANK", "0"))
            count = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world)
        share = count / world
        self.largest = largest
        self._calls = math.inf
        if calls is not None:
            shares = -(-world // count)
            if calls < shares:
                parts, more = ("ranks", ", or a file that the ranks of a machine share") if file is None else ("machines", "")
                raise ValueError(f"calls is {calls}, but {shares} {parts} divide it; give at least {shares}{more}")
            # Rank r has the calls from calls r / world to calls (r + 1) / world, so that all shares sum to ``calls``.
            self._calls = calls * (first + count) // world - calls * first // world
        self._cost = math.inf if cost is None else cost * share
        self._requests = _rate(requests_per_minute, share, _TOTALS, least=1.0)
        self._units = _rate(units_per_minute, share, _TOTALS + NUMBERS, least=largest)
        self._clock = clock
        self._shared = SharedNumbers(_TOTALS + 2 * NUMBERS, file=None if file is None else Path(file))

    def claim(self, count: int) -> None:
        """Take ``count`` calls from the budget. Raises BudgetSpent, and takes none, if fewer calls or no money is left."""
        with self._shared.locked() as numbers:
            made, paid = numbers[_CALLS], numbers[_COST]
            if paid >= self._cost:
                raise BudgetSpent(f"the budget of {self._cost:g} for the judge is spent ({paid:.2f}); raise its `cost` to continue")
            if made + count > self._calls:
                raise BudgetSpent(
                    f"the budget of {self._calls} calls of the judge is spent: {made:.0f} were made, {count} more are needed; "
                    "raise its `calls` to continue"
                )
            numbers[_CALLS] += count

    def claim_another(self) -> bool:
        """Take one more call from the budget, for a retry. Returns False if no call is left."""
        try:
            self.claim(1)
        except BudgetSpent:
            return False
        return True

    def spent(self) -> tuple[int, float]:
        """The calls and the money spent so far."""
        with self._shared.locked() as numbers:
            return int(numbers[_CALLS]), numbers[_COST]

    def turn(self, units: float) -> Turn:
        """Start a request of at most ``units`` units if the rate limits allow it, or return how long to wait."""
        wanted = [(rate, amount) for rate, amount in ((self._requests, 1.0), (self._units, units)) if rate is not None]
        with self._shared.locked() as numbers:
            now = self._clock()
            wait = max((rate.wait(numbers, now, amount) for rate, amount in wanted), default=0.0)
            if wait:
                return Turn(wait, now)
            expected = [rate.start(numbers, now, amount) for rate, amount in wanted]
        return Turn(0.0, now, expected[-1] if self._units is not None else 0.0)

    def settle(self, turn: Turn, *, used: float, cost: float) -> None:
        """Record the actual ``used`` units and ``cost`` of a started request. Raises ValueError if one is negative or not
        finite."""
        if not (0 <= used < math.inf and 0 <= cost < math.inf):
            raise ValueError(f"a request cannot have used {used} units at a cost of {cost}")
        with self._shared.locked() as numbers:
            numbers[_COST] += cost
            if self._units is not None:
                self._units.settle(numbers, turn.now, most=self.largest, expected=turn.expected, used=used)


class Turns:
    """Starts the requests of one process in order, as fast as the quota allows. Created and used on one event loop."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._queue = asyncio.Lock()

    async def next(self, units: float, *, latest: float) -> Turn | None:
        """Wait until a request of at most ``units`` units may start, and start it. Returns None immediately if that is after
        ``latest``."""
        async with self._queue:
            while (turn := await asyncio.to_thread(self._quota.turn, units)).wait:
                if turn.now + turn.wait > latest:
                    return None
                await asyncio.sleep(turn.wait)
        return turn


def _rate(per_minute: float | None, share: float, at: int, *, least: float) -> MinuteRate | None:
    if per_minute is None:
        return None
    if not 0 < least <= per_minute * share:
        raise ValueError(f"one request takes {least:g}, but only {per_minute * share:g} are allowed per minute; raise the limit")
    return MinuteRate(per_minute * share, at=at)


T = TypeVar("T")


def submit(coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
    """Run the coroutine on the loop and return its future immediately. May be called from any thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process. A forked process has no threads of its parent, so it gets its own loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-loop", daemon=True).start()
    return loop


class ProgressSemaphore:
    """Admits ``places`` requests at once, in order. Used on one event loop. ``patience``: seconds without an answer to any request
    after which waiting requests are dropped. ``clock``: returns seconds."""

    def __init__(self, places: int, *, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = asyncio.Semaphore(places)
        self._patience = patience
        self._clock = clock
        self._answered = -math.inf

    def answered(self) -> None:
        """Record that a request was answered."""
        self._answered = self._clock()

    async def enter(self, *, since: float) -> float:
        """Wait for a place and return the time until which it may be used; ``leave`` releases the place. ``since``: the time at
        which waiting began. Raises TimeoutError if no request was answered for ``patience`` seconds."""
        entering = asyncio.ensure_future(self._places.acquire())
        try:
            while not entering.done():
                left = self._end(since) - self._clock()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait({entering}, timeout=left)
        except BaseException:
            if not entering.cancel():
                self.leave()  # the place was acquired in the meantime
            raise
        return self._end(since)

    async def enter_again(self) -> None:
        """Wait for a place again, without a time-out, for a request that already knows its deadline."""
        await self._places.acquire()

    def leave(self) -> None:
        """Release the place, so that the next request is admitted."""
        self._places.release()

    def _end(self, since: float) -> float:
        return max(since, self._answered) + self._patience
