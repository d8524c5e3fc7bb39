"""A limit on samples a minute, held by this process alone or, through a small file, by all processes of a machine together.

Each takes the next free slot and waits for it, so the rate is never above the limit and, while there is work, hardly below it.
"""

import fcntl
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

_TIME = struct.Struct("<d")
# A slot further off than anybody waits was written before the machine was started anew.
_FAR = 86400.0


class RateLimit:
    """``per_minute`` samples. ``file``: shared with all who name it on this machine. ValueError: a limit of 0 or less."""

    def __init__(self, per_minute: float, *, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < per_minute < math.inf:
            raise ValueError(f"a rate of {per_minute} samples a minute: give one above 0")
        self._seconds = 60.0 / per_minute
        self._file = file
        self._clock = clock
        self._next = 0.0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def reserve(self, count: int, *, latest: float) -> float | None:
        """When to begin: ``count`` slots in a row are taken from then on. None, and nothing taken, where that is after ``latest``.

        Both are times of the ``clock``; all processes of a machine share ``time.monotonic``.
        """
        if self._file is None:
            begin, self._next = self._slot(self._next, count, latest)
            return begin
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            stored = os.pread(descriptor, _TIME.size, 0)
            start: float = _TIME.unpack(stored)[0] if len(stored) == _TIME.size else 0.0
            begin, following = self._slot(start if math.isfinite(start) else 0.0, count, latest)
            os.pwrite(descriptor, _TIME.pack(following), 0)
        finally:
            os.close(descriptor)
        return begin

    def _slot(self, free: float, count: int, latest: float) -> tuple[float | None, float]:
        """When these begin, and when the slot after them is free."""
        now = self._clock()
        start = now if free > now + _FAR else max(now, free)
        if start > latest:
            return None, free
        return start, start + count * self._seconds
