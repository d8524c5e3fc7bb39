"""The event loop of a process for all rewards that ask servers. It runs on its own thread until the process ends.

Connections, limits and locks belong to the loop on which they were made, so with a new loop for each call they would fail at the
second call.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
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
