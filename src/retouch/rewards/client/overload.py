"""Protect failing servers from more load: a circuit breaker for each server, and a budget for the retries of a client.

All times are seconds of one monotonic clock.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CircuitBreaker:
    """Excludes a server that fails repeatedly, until a probe succeeds.

    Closed (requests are sent) until ``failures`` requests in a row fail, then open (no requests) for ``pause`` seconds. Each failed
    probe doubles the pause, up to ``max_pause``. Source: Nygard, "Release It!", chapter "Stability Patterns".
    """

    failures: int = 3
    pause: float = 0.25
    max_pause: float = 4.0
    in_a_row: int = 0
    opened: int = 0
    probe_at: float = field(default=0.0)

    @property
    def closed(self) -> bool:
        """Whether requests are sent to the server."""
        return self.opened == 0

    def succeeded(self) -> None:
        """Record that a request or a probe succeeded, and close the breaker."""
        self.in_a_row = self.opened = 0

    def failed(self, now: float, *, last: bool) -> None:
        """Record a failed request. The ``last`` closed breaker of a client stays closed, because a failing server is better than
        none."""
        self.in_a_row += 1
        if self.closed and self.in_a_row >= self.failures and not last:
            self.open(now)

    def open(self, now: float) -> None:
        """Exclude the server after a time-out or a failed probe; if it is excluded already, for twice as long as before."""
        self.probe_at = now + min(self.max_pause, self.pause * 2.0 ** min(self.opened, 16))
        self.opened += 1

    def probe_due(self, now: float) -> bool:
        """Whether a probe is due (half-open)."""
        return not self.closed and now >= self.probe_at


@dataclass(slots=True)
class RetryBudget:
    """Limits additional requests (retries, hedges) to a share of the first ones, plus a fixed rate.

    ``share``: additional requests per first request. ``per_second``: further additional requests per second. ``max_saved``: the
    largest number of unused requests that are kept for later. Without this budget, clients would multiply the load of servers that
    are already overloaded. Source: Beyer et al., "Site Reliability Engineering" (2016), chapter "Handling Overload".
    """

    share: float
    per_second: float
    max_saved: float
    saved: float = field(init=False)
    counted_until: float | None = field(default=None)

    def __post_init__(self) -> None:
        self.saved = self.max_saved

    def first_request(self) -> None:
        """Count a first request."""
        self.saved = min(self.max_saved, self.saved + self.share)

    def take(self, now: float) -> bool:
        """Whether one additional request may be made now; if so, it is counted."""
        if self.counted_until is not None:
            self.saved = min(self.max_saved, self.saved + (now - self.counted_until) * self.per_second)
        self.counted_until = now
        if self.saved < 1:
            return False
        self.saved -= 1
        return True
