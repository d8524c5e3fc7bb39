"""A few numbers that the processes of a machine keep together in a small file, or that one process keeps for itself."""

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Shared:
    """``count`` numbers, 0 at first. ``file``: shared with all who name it on this machine, and kept when they have ended.

    ValueError: the file holds something else.
    """

    def __init__(self, count: int, *, file: Path | None) -> None:
        self._form = struct.Struct(f"<{count}d")
        self._file = file
        self._own = [0.0] * count
        self._lock = threading.Lock()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with self.held():
                pass

    @contextmanager
    def held(self) -> Iterator[list[float]]:
        """The numbers, for this block alone; they are kept as it leaves them, unless it raises."""
        with self._lock:
            if self._file is None:
                numbers = list(self._own)
                yield numbers
                self._own = numbers
                return
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                numbers = self._read(descriptor)
                yield numbers
                os.pwrite(descriptor, self._form.pack(*numbers), 0)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int) -> list[float]:
        stored = os.pread(descriptor, self._form.size + 1, 0)
        if not stored:
            return [0.0] * len(self._own)
        if len(stored) != self._form.size:
            raise ValueError(f"{self._file} is no file of a quota; name another one, or remove it")
        return list(self._form.unpack(stored))
