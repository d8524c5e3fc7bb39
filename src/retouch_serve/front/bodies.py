"""Reads bodies within limits on size, rate and memory.

Bodies that arrive slowly share half of the memory, so they leave room for those that are sent at once.
"""

import asyncio

from starlette.requests import ClientDisconnect, Request

from retouch_serve.front.connections import FrontLimits
from retouch_serve.front.memory import MemoryBudget
from retouch_serve.wire.errors import RequestError

_PROMPT_SECONDS = 1.0


class Bodies:
    """The memory of all bodies of a server. ``slow``: of the bodies that are still arriving after 1 s."""

    def __init__(self, limits: FrontLimits) -> None:
        self.limits = limits
        self.memory = MemoryBudget(limits.max_memory_bytes)
        self.slow = MemoryBudget(limits.max_memory_bytes // 2)


class Body:
    """The body of one request. Its memory is reserved until ``release``."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = self._held_slowly = 0
        self._is_slow = False

    async def read(self, request: Request, *, max_bytes: int) -> bytes:
        """Read the body. At any time, it may have taken ``body_seconds``, and 1 s for each ``min_body_rate`` bytes that arrived.

        Raises RequestError if the body is compressed, is larger than ``max_bytes``, arrives too slowly, or if no memory is left.
        """
        limits = self._bodies.limits
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise RequestError("unsupported")
        stated = request.headers.get("content-length", "0")
        if not stated.isascii() or not stated.isdigit() or len(stated) > 18:
            raise RequestError("bad_body")
        if int(stated) > max_bytes:
            raise RequestError("too_large")
        content = bytearray()
        loop = asyncio.get_running_loop()
        latest = loop.time() + limits.body_seconds
        deadline = asyncio.timeout_at(latest)
        slow = loop.call_later(_PROMPT_SECONDS, self.becomes_slow, deadline)
        try:
            async with deadline:
                async for part in request.stream():
                    if len(content) + len(part) > max_bytes:
                        raise RequestError("too_large")
                    self._hold(len(part))
                    content += part
                    deadline.reschedule(latest + len(content) / limits.min_body_rate)
        except TimeoutError:
            raise RequestError("too_slow") from None
        except ClientDisconnect:
            raise RequestError("bad_body") from None
        finally:
            slow.cancel()
            self._bodies.slow.release(self._held_slowly)
        return bytes(content)

    def becomes_slow(self, deadline: asyncio.Timeout) -> None:
        """Count the body among the slow ones. If their memory does not suffice, it is given up at once."""
        self._is_slow = True
        try:
            self._bodies.slow.hold(self._held)
        except RequestError:
            deadline.reschedule(asyncio.get_running_loop().time())
        else:
            self._held_slowly = self._held

    def release(self) -> None:
        """Release the memory."""
        self._bodies.memory.release(self._held)
        self._held = 0

    def _hold(self, count: int) -> None:
        if self._is_slow:
            self._bodies.slow.hold(count)
            self._held_slowly += count
        self._bodies.memory.hold(count)
        self._held += count
