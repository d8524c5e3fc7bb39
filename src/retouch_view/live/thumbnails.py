"""Makes thumbnails of images, and caches them in memory."""

import io
import threading
from collections import OrderedDict
from pathlib import Path

from PIL import Image

from retouch.records.files import open_file
from retouch.rewards.ledger.database import UNREADABLE

EDGE = 192
_MOST_BYTES = 64 * 2**20


class Thumbnails:
    """A cache of PNG thumbnails with edges of at most ``EDGE`` pixels; above 64 MiB, the least recently used ones are dropped."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Path, int], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: Path) -> bytes | None:
        """Return the thumbnail of an image; None if the file is not an image."""
        try:
            key = path, path.stat().st_mtime_ns
        except OSError:
            return None
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = _make(path)
        if made is not None:
            with self._lock:
                self._bytes += 0 if key in self._kept else len(made)
                self._kept[key] = made
                while self._bytes > _MOST_BYTES:
                    self._bytes -= len(self._kept.popitem(last=False)[1])
        return made


def _make(path: Path) -> bytes | None:
    try:
        with open_file(path) as file, Image.open(file) as opened:
            opened.draft("RGB", (EDGE, EDGE))
            opened.thumbnail((EDGE, EDGE))
            content = io.BytesIO()
            opened.convert("RGB").save(content, "PNG", compress_level=1)
            return content.getvalue()
    except UNREADABLE:
        return None
