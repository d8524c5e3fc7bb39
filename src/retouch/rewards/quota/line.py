"""A line before so many places: who waits is let in in turn, and gives up when nobody has been answered for too long.

So a large step may take as long as it needs while its judges work, and a step whose judges are dead ends soon, all of it at once.
"""

import asyncio
import math
import time
from collections.abc import Callable


class ProgressSemaphore:
    """``places`` at once. ``patience``: seconds without any answer after which those in line give up. Used on one event loop."""

    def __init__(self, places: int, *, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = asyncio.Semaphore(places)
        self._patience = patience
        self._clock = clock
        self._answered = -math.inf

    def answered(self) -> None:
        """Somebody got an answer."""
        self._answered = self._clock()

    async def enter(self, *, since: float) -> float:
        """Wait for a place, from ``since`` on; until when it may be kept (``leave`` gives it back).

        TimeoutError: there was no answer to anybody for too long.
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
                self.leave()  # it was let in at the last moment
            raise
        return self._end(since)

    async def enter_again(self) -> None:
        """The same for one who was in before, and knows until when."""
        await self._places.acquire()

    def leave(self) -> None:
        """Let the next one in."""
        self._places.release()

    def _end(self, since: float) -> float:
        return max(since, self._answered) + self._patience
