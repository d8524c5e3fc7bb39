"""Follows files to which another process appends: JSON lines, and the answers in a ledger."""

import os
import sqlite3
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any

from retouch.records.files import LONGEST_LINE, MOST_BYTES, open_file
from retouch.records.shapes import Shape, checked, strict_json
from retouch.rewards.ledger.database import JudgeUsage, open_read_only, read_usage

_LEDGER_SECONDS = 2.0
_MOST_USAGE = 1e15


class LineTail:
    """Reads the objects of a JSON Lines file; each update reads only the lines that were appended since.

    A run that resumes replaces its files by shorter ones; the file is then read from the beginning. ``lines``: all objects so far.
    ``damaged``: the number of complete lines that are not strict JSON objects of the ``shape``, or have more than 16 MiB; they are
    skipped.
    """

    def __init__(self, path: Path, shape: Shape | None = None) -> None:
        self._path, self._shape = path, shape
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.lines: list[dict[str, Any]] = []
        self.damaged = 0

    def update(self) -> bool:
        """Read the new lines. Returns whether the file was replaced or removed, so that the lines from before are not valid.

        Raises OSError if the file exists and cannot be read, and ValueError if it has more than 1 GiB.
        """
        try:
            file = open_file(self._path)
        except FileNotFoundError:  # not written yet, or removed
            again = self._inode is not None
            self._begin(None)
            return again
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_size > MOST_BYTES:
                raise ValueError(f"{self._path} has more than {MOST_BYTES} bytes")
            again = self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self._offset)
            if again or self._inode is None:
                self._begin(stat.st_ino)
            file.seek(self._offset)
            while line := file.readline(LONGEST_LINE):
                if line.endswith(b"\n"):
                    self._append(line)
                elif len(line) < LONGEST_LINE:
                    break  # it is being written
                self._offset += len(line)
        return again

    def _append(self, line: bytes) -> None:
        try:
            found = strict_json(line)
            if not isinstance(found, dict):
                raise ValueError("not an object")
            self.lines.append(found if self._shape is None else checked(self._shape, found, str(self._path)))
        except ValueError:
            self.damaged += 1


class UsageTail:
    """Sums the usage of the answers in a ledger; each update reads only the new answers. If the ledger cannot be read, the sum
    stays the same, and the next update tries again. Impossible amounts are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: list[tuple[int, int, int]] = []
        self._inode = 0
        self._last = 0
        self._used = JudgeUsage()

    def update(self) -> JudgeUsage:
        """Return the usage of all answers so far."""
        stamp = [_stamp(path) for path in (self._path, self._path.with_name(f"{self._path.name}-wal"))]
        if stamp != self._stamp:
            if stamp[0][0] != self._inode:  # the file was replaced
                self._inode, self._last, self._used = stamp[0][0], 0, JudgeUsage()
            try:
                with closing(open_read_only(self._path, seconds=_LEDGER_SECONDS)) as connection:
                    used, self._last = read_usage(connection, after=self._last)
            except sqlite3.Error as error:
                if str(error) == "interrupted":  # it took too long, and would again
                    self._stamp = stamp
                return self._used
            except (OSError, ValueError):
                return self._used
            self._stamp = stamp
            if all(0 <= amount < _MOST_USAGE for amount in astuple(used)):
                self._used += used
        return self._used


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
