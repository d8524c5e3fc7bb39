"""How long to wait before asking again: exponential backoff with full jitter, or as long as the server says."""

import email.utils
import math
import time

import torch

from retouch.core.random import generator


def backoff_pause(attempt: int, key: str, *, base: float, longest: float) -> float:
    """Seconds, uniform between 0 and min(longest, base 2^attempt) (full jitter), drawn by ``key`` and the attempt, which counts
    from 0."""
    draw = torch.rand((), generator=generator("judge", "pause", key, attempt)).item()
    return draw * min(longest, base * 2.0 ** min(attempt, 30))


def retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header, given as seconds or as a date; None if it says nothing readable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
