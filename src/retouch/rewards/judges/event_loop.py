"""The one event loop of a process for everything that talks to judges: it runs on a thread of its own for as long as the process.

Connections, limits and locks belong to the loop on which they were made, so a loop per call breaks them from the second call on.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine gives, run on the loop while this thread waits. Call it from any thread but the loop's own."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid())).result()


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process: a fork has no threads of its parent's, so it gets another one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="judge-loop", daemon=True).start()
    return loop
