"""How long to wait before asking again: exponential with full jitter, or as long as the server says."""

import email.utils
import math
import time
from dataclasses import dataclass

import torch

from retouch.core.random import generator


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds: the first pause is up to ``base``, each next one up to twice that, never more than ``cap``. ValueError otherwise."""

    base: float = 0.5
    cap: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.base <= self.cap < math.inf:
            raise ValueError(f"a pause from {self.base} up to {self.cap} seconds: give 0 < base <= cap")

    def pause(self, attempt: int, key: str) -> float:
        """Uniform between 0 and min(cap, base 2^attempt) (full jitter), drawn by ``key`` and the attempt, which counts from 0."""
        draw = torch.rand((), generator=generator("judge", "pause", key, attempt)).item()
        return draw * min(self.cap, self.base * 2.0 ** min(attempt, 30))


def retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header, given as seconds or as a date; None where it says nothing readable."""
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
