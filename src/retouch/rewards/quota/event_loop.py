"""The event loop of the clients of judges and reward servers, and the queue of those who wait for a place.

The event loop of a process for all rewards that ask servers. It runs on its own thread until the process ends.

Connections, limits and locks belong to the loop on which they were made, so with a new loop for each call they would fail at the
second call.

A semaphore with a time-out that restarts at each answer: waiting requests are dropped only if no request is answered for too
long.

So a large step may take as long as it needs while its judges answer, and if the judges are down, all waiting requests end together
and soon.
"""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

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
    """Admits ``places`` requests at once, in order. Used on one event loop.

    ``patience``: seconds without an answer to any request after which waiting requests are dropped. ``clock``: returns seconds.
    """

    def __init__(self, places: int, *, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = asyncio.Semaphore(places)
        self._patience = patience
        self._clock = clock
        self._answered = -math.inf

    def answered(self) -> None:
        """Record that a request was answered."""
        self._answered = self._clock()

    async def enter(self, *, since: float) -> float:
        """Wait for a place and return the time until which it may be used; ``leave`` releases the place.

        ``since``: the time at which waiting began. Raises TimeoutError if no request was answered for ``patience`` seconds.
        """
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
