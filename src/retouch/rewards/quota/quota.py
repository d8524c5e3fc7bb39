"""What may be asked of a judge or of reward servers: so much a minute, and so much in all.

All ranks and processes that name the same file share one quota. The ranks of a run that are on other machines have a file there, so
each machine has its ranks' share; without a file each rank has its own share. Whoever asks claims the calls first, and where the
budget does not have them the run ends (``BudgetSpent``); then each request waits for its turn.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from retouch.rewards.quota.pace import NUMBERS, Pace
from retouch.rewards.quota.shared import Shared

_CALLS, _COST, _TOTALS = 0, 1, 2


class BudgetSpent(ValueError):
    """No more may be asked. A run ends then, on all ranks and with a checkpoint."""


class Turn(NamedTuple):
    """``wait``: seconds from ``now`` after which to ask again; 0 where the request begins now, with so many units ``expected``."""

    wait: float
    now: float
    expected: float = 0.0


class Quota:
    """``requests_per_minute``. ``units_per_minute``: tokens or samples, of which one request takes ``largest`` at most. ``calls``:
    requests in all, repeated ones too. ``cost``: money in all, as the prices state it; what is under way when it is spent is
    still paid for. None is no limit.

    ``file``: on this machine's own disk; what is spent stays spent from run to run. ``share``: of every limit; by default the share
    of the run's ranks that count here. ValueError: a limit that is out of range, or by which nothing could ever be asked.
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
        share: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = {"requests_per_minute": requests_per_minute, "units_per_minute": units_per_minute, "calls": calls, "cost": cost}
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"{name} {limit}: give a limit above 0, or none")
        share = _share_of_ranks(together=file is not None) if share is None else share
        self.largest = largest
        self._calls = math.inf if calls is None else int(calls * share)
        self._cost = math.inf if cost is None else cost * share
        self._requests = _pace(requests_per_minute, share, _TOTALS, least=1.0)
        self._units = _pace(units_per_minute, share, _TOTALS + NUMBERS, least=largest)
        self._clock = clock
        self._shared = Shared(_TOTALS + 2 * NUMBERS, file=None if file is None else Path(file))

    @property
    def counts_money(self) -> bool:
        """Whether money is what limits it."""
        return self._cost < math.inf

    def claim(self, count: int) -> None:
        """Take so many calls out of the budget. BudgetSpent, and none is taken, where it does not have them or no more money."""
        with self._shared.held() as numbers:
            made, paid = numbers[_CALLS], numbers[_COST]
            if paid >= self._cost:
                raise BudgetSpent(f"the budget of {self._cost:g} for the judge is spent ({paid:.2f}); raise its `cost` to go on")
            if made + count > self._calls:
                raise BudgetSpent(
                    f"the budget of {self._calls} calls of the judge is spent: {made:.0f} are made, {count} more are needed; "
                    "raise its `calls` to go on"
                )
            numbers[_CALLS] += count

    def claim_another(self) -> bool:
        """One call more, for something that was asked already; False where the budget does not have it."""
        try:
            self.claim(1)
        except BudgetSpent:
            return False
        return True

    def spent(self) -> tuple[int, float]:
        """Calls and money so far."""
        with self._shared.held() as numbers:
            return int(numbers[_CALLS]), numbers[_COST]

    def turn(self, units: float) -> Turn:
        """Whether a request of at most so many units may begin now; if so, it does."""
        asked = [(pace, much) for pace, much in ((self._requests, 1.0), (self._units, units)) if pace is not None]
        with self._shared.held() as numbers:
            now = self._clock()
            wait = max((pace.wait(numbers, now, much) for pace, much in asked), default=0.0)
            if wait:
                return Turn(wait, now)
            expected = [pace.take(numbers, now, much) for pace, much in asked]
        return Turn(0.0, now, expected[-1] if self._units is not None else 0.0)

    def settle(self, turn: Turn, *, used: float, cost: float) -> None:
        """A request that might have taken ``largest`` units took ``used``, and cost so much."""
        with self._shared.held() as numbers:
            numbers[_COST] += cost
            if self._units is not None:
                self._units.settle(numbers, turn.now, most=self.largest, expected=turn.expected, used=used)


class Turns:
    """The requests of one process, one after another as the quota lets them. Made and used on one event loop."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._queue = asyncio.Lock()

    async def next(self, units: float, *, latest: float) -> Turn | None:
        """Return when a request of at most so many units may begin; None, at once, where that is after ``latest``."""
        async with self._queue:
            while (turn := await asyncio.to_thread(self._quota.turn, units)).wait:
                if turn.now + turn.wait > latest:
                    return None
                await asyncio.sleep(turn.wait)
        return turn


def _pace(per_minute: float | None, share: float, at: int, *, least: float) -> Pace | None:
    if per_minute is None:
        return None
    if not 0 < least <= per_minute * share:
        raise ValueError(f"one request takes {least:g}, and {per_minute * share:g} are allowed here in a minute; raise the limit")
    return Pace(per_minute * share, at=at)


def _share_of_ranks(*, together: bool) -> float:
    """Of the run's ranks, those that count in this machine's file, or this one alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if together else 1
    return min(1.0, here / world)
