"""Limits on calls to a judge or to reward servers: per minute, and in total.

All processes of a machine that use the same file share one quota. A run on several machines has one file on each machine, with the
share of the ranks on that machine; without a file, each rank has its own share. A caller first claims all its calls from the total
budget, and the run ends if the budget is too small (``BudgetSpent``); then each request waits for the rate limit.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from retouch.rewards.quota.rate import NUMBERS, MinuteRate
from retouch.rewards.quota.shared_numbers import SharedNumbers

_CALLS, _COST, _TOTALS = 0, 1, 2


class BudgetSpent(ValueError):
    """The total budget is too small for the next calls. The run ends on all ranks, with a checkpoint."""


class Turn(NamedTuple):
    """The result of ``Quota.turn``.

    ``wait``: seconds from ``now`` until the next try; 0 if the request has started, with ``expected`` units counted for it.
    """

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
        ranks, world = _ranks_of_share(per_machine=file is not None)
        share = len(ranks) / world
        self.largest = largest
        self._calls = math.inf if calls is None else _share_of_calls(calls, ranks, world, per_machine=file is not None)
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


def _ranks_of_share(*, per_machine: bool) -> tuple[range, int]:
    """The ranks that have one share: those of this machine, or this rank alone; and the number of ranks of the run."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if not per_machine:
        return range(rank, rank + 1), world
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world)), world


def _share_of_calls(calls: int, ranks: range, world: int, *, per_machine: bool) -> int:
    """The calls of these ranks. Rank r has those from calls r / world to calls (r + 1) / world, so that all shares sum to
    ``calls``."""
    shares = -(-world // len(ranks))
    if calls < shares:
        parts, more = ("machines", "") if per_machine else ("ranks", ", or a file that the ranks of a machine share")
        raise ValueError(f"calls is {calls}, but {shares} {parts} divide it; give at least {shares}{more}")
    return calls * ranks.stop // world - calls * ranks.start // world
