"""The one event loop of a process for rewards that ask other processes; it runs on a thread of its own for as long as the process.

Connections, limits and locks belong to the loop on which they were made, so a loop per call breaks them from the second call on.
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
    """Run the coroutine on the loop while the caller goes on. From any thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process: a fork has none of its parent's threads, so it gets another one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-loop", daemon=True).start()
    return loop
