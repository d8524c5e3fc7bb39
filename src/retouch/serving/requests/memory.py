"""The memory that all requests of a server take together: bodies, and images from their decoding until the last use."""

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator

from PIL import Image

from retouch.rewards.wire.errors import RequestError

BYTES_PER_PIXEL = 4
"""Of a decoded image in RGB, as Pillow stores it."""
DECODING_BYTES = 12
"""Further bytes per pixel while an image is decoded: a canvas with transparency, its copy, and the converted image."""
_TRIM_BYTES = 64 * 2**20


class MemoryBudget:
    """At most ``most`` bytes are held at the same time. May be used from several threads, also by finalizers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = self._peak = 0
        self._lock = threading.Lock()
        # Finalizers run in any thread at any point, also inside the lock, so they only append here.
        self._released: deque[int] = deque()

    @property
    def held(self) -> int:
        """The bytes that are held now."""
        with self._lock:
            return self._settle()

    def hold(self, count: int) -> None:
        """Hold ``count`` more bytes. RequestError ("busy"): there is no room for them."""
        with self._lock:
            if self._settle() + count > self._most:
                raise RequestError("busy")
            self._held += count
            self._peak = max(self._peak, self._held)

    def release(self, count: int) -> None:
        """Give back what was held."""
        self._released.append(count)

    @contextlib.contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold ``count`` bytes for the length of the block. RequestError ("busy"): there is no room for them."""
        self.hold(count)
        try:
            yield
        finally:
            self.release(count)

    def release_with(self, image: Image.Image, count: int) -> None:
        """Give back ``count`` bytes when the image is no longer used anywhere."""
        weakref.finalize(image, self.release, count).atexit = False

    def trim(self) -> bool:
        """Return freed memory to the operating system, if much of it was freed since the last time; says whether it did."""
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
