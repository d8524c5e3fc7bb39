"""The runs of a folder, and which of their files may be served.

The name of a run in a request is only compared with the names that were found on the disk; no path is built from it.
"""

import re
import threading
from pathlib import Path

from retouch.records.files import inside
from retouch_view.live.live_run import LiveRun

_MARKS = ("recipe.json", "metrics.jsonl", "owner.json", "train.log")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,100}\.png", re.ASCII)


class Catalogue:
    """The runs directly in ``root``, or ``root`` itself if it is the folder of a run. Each call of ``runs`` finds new runs."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, LiveRun] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, LiveRun]:
        """Return all runs by name, sorted by name."""
        with self._lock:
            found = self._find()
            self._runs = {name: self._runs.get(name) or LiveRun(path) for name, path in sorted(found.items())}
            return dict(self._runs)

    def run(self, name: str) -> LiveRun | None:
        """Return the run with this name; None if there is none."""
        with self._lock:
            known = self._runs.get(name)
        if known is not None and known.folder.root.is_dir():
            return known
        return self.runs().get(name)

    def image(self, name: str, step: int, file: str) -> Path | None:
        """Return the path of a stored image; None if there is none, or if it is a link or is behind one."""
        run = self.run(name)
        if run is None or _IMAGE.fullmatch(file) is None:
            return None
        try:
            path = inside(run.folder.samples(step), file)
        except OSError:
            return None
        return path if path.is_file() else None

    def _find(self) -> dict[str, Path]:
        if _is_run(self.root):
            return {self.root.name: self.root}
        try:
            return {path.name: path for path in self.root.iterdir() if not path.is_symlink() and path.is_dir() and _is_run(path)}
        except OSError:  # the folder was not created yet, or was removed
            return {}


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)
