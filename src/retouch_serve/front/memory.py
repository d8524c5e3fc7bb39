"""A budget for the memory of all requests of a server: bodies, and images from their decoding until their last use."""

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator

from PIL import Image

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
