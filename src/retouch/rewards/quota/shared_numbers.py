"""A few numbers that the processes of a machine share through a small file, or that one process keeps in memory."""

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retouch.records import files


class SharedNumbers:
    """``count`` float64 numbers, initially 0.

    ``file``: shared by all processes of the machine that use the same file, and kept after they end; None keeps the numbers in
    memory. The file must be on a local disk, because it is locked. Raises ValueError if the file has another content.
    """

    def __init__(self, count: int, *, file: Path | None) -> None:
        self._format = struct.Struct(f"<{count}d")
        self._file = file
        self._in_memory = [0.0] * count
        self._lock = threading.Lock()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[list[float]]:
        """Exclusive access to the numbers. Changes are stored when the block ends, unless the block raises."""
        with self._lock:
            if self._file is None:
                numbers = list(self._in_memory)
                yield numbers
                self._in_memory = numbers
                return
            descriptor = files.open_handle(self._file, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                numbers = self._read(descriptor)
                yield numbers
                os.pwrite(descriptor, self._format.pack(*numbers), 0)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int) -> list[float]:
        stored = os.pread(descriptor, self._format.size + 1, 0)
        if not stored:
            return [0.0] * len(self._in_memory)
        if len(stored) != self._format.size:
            raise ValueError(f"{self._file} is not a quota file; give another file, or remove it")
        return list(self._format.unpack(stored))
