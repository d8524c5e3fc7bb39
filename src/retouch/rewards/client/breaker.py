"""A circuit breaker: an endpoint that fails again and again is left alone for a while, and then tried with a probe."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Breaker:
    """Closed until ``failures`` in a row, then open for ``pause`` seconds, doubled each time a probe fails, up to ``longest``.

    Times are those of one monotonic clock, in seconds.
    """

    failures: int = 3
    pause: float = 0.25
    longest: float = 4.0
    in_a_row: int = 0
    opened: int = 0
    probe_at: float = field(default=0.0)

    @property
    def closed(self) -> bool:
        """Whether requests go there."""
        return self.opened == 0

    def succeeded(self) -> None:
        """A request or a probe came back as it should."""
        self.in_a_row = self.opened = 0

    def failed(self, now: float, *, last: bool) -> None:
        """A request failed. The ``last`` closed one of several stays closed: asking it beats asking nobody."""
        self.in_a_row += 1
        if self.closed and self.in_a_row >= self.failures and not last:
            self.open(now)

    def open(self, now: float) -> None:
        """Leave it alone; again, and for longer, where a probe failed."""
        self.probe_at = now + min(self.longest, self.pause * 2.0 ** min(self.opened, 16))
        self.opened += 1

    def due(self, now: float) -> bool:
        """Whether it is time for a probe (half-open)."""
        return not self.closed and now >= self.probe_at
