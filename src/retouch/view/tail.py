"""Follows files to which another process appends: JSON lines, and the answers in a ledger."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from retouch.records.files import open_file
from retouch.rewards.ledger.database import JudgeUsage, open_read_only, read_usage


class LineTail:
    """Reads the objects of a JSON Lines file; each update reads only the lines that were appended since.

    A run that resumes replaces its files by shorter ones; the file is then read from the beginning. ``lines``: all objects so far.
    ``damaged``: the number of complete lines that are not JSON objects; they are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.lines: list[dict[str, Any]] = []
        self.damaged = 0

    def update(self) -> bool:
        """Read the new lines. Returns whether the file was replaced or removed, so that the lines from before are not valid."""
        try:
            with open_file(self._path) as file:
                stat = os.fstat(file.fileno())
                again = self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self._offset)
                if again or self._inode is None:
                    self._begin(stat.st_ino)
                file.seek(self._offset)
                content = file.read()
        except OSError:  # not written yet, removed, or a folder
            again = self._inode is not None
            self._begin(None)
            return again
        complete, newline, _ = content.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        for line in complete.split(b"\n") if newline else ():
            self._append(line)
        return again

    def _append(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            self.lines.append(found)
        else:
            self.damaged += 1


class UsageTail:
    """Sums the usage of the answers in a ledger; each update reads only the new answers. If the ledger cannot be read, the sum
    stays the same, and the next update tries again."""

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
                with closing(open_read_only(self._path)) as connection:
                    used, self._last = read_usage(connection, after=self._last)
            except (OSError, ValueError, sqlite3.Error):
                return self._used
            self._stamp, self._used = stamp, self._used + used
        return self._used


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
