"""Logging at a bounded rate, so that requests cannot fill a disk: excess records are counted instead of written."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST = 4000  # characters of a message, and of a traceback
_MOST_KINDS = 500


@dataclass(slots=True)
class _Bucket:
    """A token bucket. ``left``: records that may still be written, at the time ``at``. ``dropped``: records not written."""

    left: float
    at: float
    dropped: int = 0


class BoundedRate(logging.Filter):
    """Passes ``burst`` records of a kind (logger and message without its arguments), and then ``per_minute`` records per minute.

    The limit for all kinds together is ten times as high. A record that passes after others were dropped reports their number. Long
    messages and tracebacks are truncated.
    """

    def __init__(self, *, burst: int = 20, per_minute: float = 20.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._burst, self._per_minute, self._clock = burst, per_minute, clock
        self._kinds: dict[tuple[str, str], _Bucket] = {}
        self._all = _Bucket(10.0 * burst, clock())

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        now = self._clock()
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        bucket = self._kinds.setdefault((record.name, str(record.msg)[:200]), _Bucket(self._burst, now))
        own = self._refill(bucket, now, self._burst, self._per_minute)
        every = self._refill(self._all, now, 10 * self._burst, 10 * self._per_minute)
        if own < 1 or every < 1:
            bucket.dropped += 1
            return False
        bucket.left -= 1
        self._all.left -= 1
        text = record.getMessage()[:_LONGEST]
        if bucket.dropped:
            text += f" (and {bucket.dropped} more since the last line of this kind)"
            bucket.dropped = 0
        record.msg, record.args = text, None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)[-_LONGEST:]
        return True

    @staticmethod
    def _refill(bucket: _Bucket, now: float, most: float, per_minute: float) -> float:
        bucket.left = min(most, bucket.left + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        return bucket.left
