"""Follows a file of JSON lines that another process appends to."""

import json
import os
from pathlib import Path
from typing import Any


class LineTail:
    """The objects in a JSON Lines file, of which each call reads only what was appended.

    A run that resumes replaces its files by shorter ones; the tail then begins again. ``lines``: what was read so far.
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
        """Read what is new. Returns whether the file began again, so that what was read before is no longer valid."""
        try:
            with self._path.open("rb") as file:
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
