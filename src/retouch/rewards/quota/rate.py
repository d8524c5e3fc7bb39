"""A rate limit that holds in each interval of 60 seconds, for requests that take different amounts.

Requests start at an even pace, slightly below the limit, based on the average amount that a request has taken so far. In addition,
the amounts of the requests of the last minute are counted for each second: a request counts with its largest possible amount until
its actual amount is known. A request that could exceed the limit does not start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MINUTE = 60
_SECONDS = 64  # counted seconds: the last minute, the current second, and some spare seconds
_PACE = 0.96  # share of the limit; the rest is for requests that a busy machine sends up to a second late
_CATCH_UP = 1.0  # seconds of delay that later requests may make up for
# Seconds. One request moves the next start by at most 63 s, so a start time further in the future than this was stored before a
# reboot, after which the clock starts again, and is ignored; the counted amounts still enforce the limit.
_MAX_AHEAD = 300.0
_WEIGHT = 0.1  # weight of the latest request in the moving average

NUMBERS = 2 + 2 * _SECONDS
"""How many numbers the state of a rate has: the next start time, the average amount, and the time and amount of each counted
second."""


@dataclass(frozen=True, slots=True)
class MinuteRate:
    """At most ``per_minute`` units in any 60 seconds.

    The state is ``NUMBERS`` numbers of a list, starting at index ``at``, initially 0. All times are in seconds of one clock.
    """

    per_minute: float
    at: int = 0

    def wait(self, numbers: Sequence[float], now: float, most: float) -> float:
        """Seconds until a request of at most ``most`` units may start; 0 if it may start now."""
        start = self._next_start(numbers, now)
        counted = [(numbers[index], numbers[index + 1]) for index in self._indices() if now - 1 - _MINUTE < numbers[index] <= now]
        total = sum(amount for _, amount in counted)
        for second, amount in sorted(counted):
            if total + most <= self.per_minute:
                break
            total -= amount
            start = max(start, second + 1 + _MINUTE)
        return max(0.0, start - now)

    def start(self, numbers: list[float], now: float, most: float) -> float:
        """Count a request that starts now. Returns the amount that it is expected to take, for ``settle``."""
        expected = min(most, numbers[self.at + 1] or most)
        numbers[self.at] = max(self._next_start(numbers, now), now - _CATCH_UP) + self._seconds(expected)
        index = self._index(now)
        if numbers[index] != int(now):
            numbers[index : index + 2] = int(now), 0.0
        numbers[index + 1] += most
        return expected

    def settle(self, numbers: list[float], started: float, *, most: float, expected: float, used: float) -> None:
        """Correct the count of the request that started at ``started``, after it took ``used`` units."""
        numbers[self.at] += self._seconds(used - expected)
        average = numbers[self.at + 1] or most
        numbers[self.at + 1] = average + _WEIGHT * (used - average)
        index = self._index(started)
        if numbers[index] == int(started):
            numbers[index + 1] += used - most

    def _next_start(self, numbers: Sequence[float], now: float) -> float:
        return numbers[self.at] if numbers[self.at] < now + _MAX_AHEAD else 0.0

    def _seconds(self, units: float) -> float:
        return units * _MINUTE / (_PACE * self.per_minute)

    def _indices(self) -> range:
        return range(self.at + 2, self.at + NUMBERS, 2)

    def _index(self, time: float) -> int:
        """The index of the second of this time in the state: the index holds the time, the next index the amount."""
        return self._indices()[int(time) % _SECONDS]
