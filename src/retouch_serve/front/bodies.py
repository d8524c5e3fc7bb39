"""Reads bodies within limits on size, rate and the memory of all of them together.

Bodies that arrive slowly share half of the memory, so they leave room for those that are sent at once.
"""

import asyncio
import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator

from PIL import Image
from starlette.requests import ClientDisconnect, Request

from retouch_serve.front.connections import FrontLimits
from retouch_serve.wire.errors import RequestError

BYTES_PER_PIXEL = 4
"""Bytes per pixel of a decoded RGB image, as Pillow stores it."""
DECODING_BYTES = 12
"""Additional bytes per pixel while an image is decoded: a canvas with transparency, its copy, and the converted image."""
_TRIM_BYTES = 64 * 2**20


class MemoryBudget:
    """A budget of at most ``most`` bytes that are reserved at the same time. Several threads and finalizers may use it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = self._peak = 0
        self._lock = threading.Lock()
        # Finalizers run in any thread at any point, also inside the lock, so they only append here.
        self._released: deque[int] = deque()

    @property
    def held(self) -> int:
        """The number of bytes that are currently reserved."""
        with self._lock:
            return self._settle()

    def hold(self, count: int) -> None:
        """Reserve ``count`` more bytes. Raises RequestError ("busy") if the budget does not suffice."""
        with self._lock:
            if self._settle() + count > self._most:
                raise RequestError("busy")
            self._held += count
            self._peak = max(self._peak, self._held)

    def release(self, count: int) -> None:
        """Release ``count`` reserved bytes."""
        self._released.append(count)

    @contextlib.contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Reserve ``count`` bytes for the duration of the block. Raises RequestError ("busy") if the budget does not suffice."""
        self.hold(count)
        try:
            yield
        finally:
            self.release(count)

    def release_with(self, image: Image.Image, count: int) -> None:
        """Release ``count`` bytes when the image is garbage-collected."""
        weakref.finalize(image, self.release, count).atexit = False

    def trim(self) -> bool:
        """Return freed memory to the operating system if at least 64 MiB were freed since the last time; returns whether it did."""
        with self._lock:
            held = self._settle()
            if self._peak - held < _TRIM_BYTES:
                return False
            self._peak = held
        with contextlib.suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        return True

    def _settle(self) -> int:
        while self._released:
            self._held -= self._released.popleft()
        return self._held


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
