"""The pause before a question is sent again: exponential backoff with full jitter, or the time that the server demands."""

import email.utils
import math
import time
from datetime import UTC

import torch

from retouch.core.random import generator


def backoff_pause(attempt: int, key: str, *, base: float, longest: float) -> float:
    """Draw a pause in seconds, uniform between 0 and min(longest, base 2^attempt) (full jitter). ``attempt`` counts from 0; the
    random generator is seeded with ``key`` and ``attempt``."""
    draw = torch.rand((), generator=generator("judge", "pause", key, attempt)).item()
    return draw * min(longest, base * 2.0 ** min(attempt, 30))


def retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header (seconds or a date, in UTC if it names no zone) to seconds, at least 0; None if it is missing or
    unreadable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
