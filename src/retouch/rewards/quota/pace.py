"""So much a minute, and never more: in any 60 seconds, whoever asks and however unevenly.

Requests begin one after another at an even pace, a little below the limit, by what requests took on average so far; whoever is late
may catch up by a second. Beside that what was begun in the last minute is counted, second by second, each request by the most that
it may take until it is known what it took; nothing begins that would be too much together with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MINUTE = 60
_SECONDS = 64  # that are counted: the last minute, the one that runs, and some to spare
_PACE = 0.96  # of the limit: requests that a busy machine sends a second late are still not too many in a minute
_LATE = 1.0
_FAR = 3600.0  # a time further off than that is from before the machine was started anew
_WEIGHT = 0.1  # of the latest request in the average

NUMBERS = 2 + 2 * _SECONDS  # that a pace keeps: when the next may begin, the average, and each second with what was begun in it


@dataclass(frozen=True, slots=True)
class Pace:
    """``per_minute`` units. It keeps ``NUMBERS`` of a list's numbers, zeros at first, from ``at`` on; times are one clock's, in
    seconds."""

    per_minute: float
    at: int = 0

    def wait(self, numbers: Sequence[float], now: float, most: float) -> float:
        """Seconds until a request of at most so many units may begin; 0 where it may now."""
        begin = self._free(numbers, now)
        known = [(numbers[place], numbers[place + 1]) for place in self._places() if now - 1 - _MINUTE < numbers[place] <= now]
        inside = sum(taken for _, taken in known)
        for second, taken in sorted(known):
            if inside + most <= self.per_minute:
                break
            inside -= taken
            begin = max(begin, second + 1 + _MINUTE)
        return max(0.0, begin - now)

    def take(self, numbers: list[float], now: float, most: float) -> float:
        """It begins now. What it is expected to take, for ``settle``."""
        expected = min(most, numbers[self.at + 1] or most)
        numbers[self.at] = max(self._free(numbers, now), now - _LATE) + self._seconds(expected)
        place = self._place(now)
        if numbers[place] != int(now):
            numbers[place : place + 2] = int(now), 0.0
        numbers[place + 1] += most
        return expected

    def settle(self, numbers: list[float], began: float, *, most: float, expected: float, used: float) -> None:
        """The request that began then took so much."""
        numbers[self.at] += self._seconds(used - expected)
        average = numbers[self.at + 1] or most
        numbers[self.at + 1] = average + _WEIGHT * (used - average)
        place = self._place(began)
        if numbers[place] == int(began):
            numbers[place + 1] += used - most

    def _free(self, numbers: Sequence[float], now: float) -> float:
        """When the pace lets the next one begin."""
        return numbers[self.at] if numbers[self.at] < now + _FAR else 0.0

    def _seconds(self, units: float) -> float:
        return units * _MINUTE / (_PACE * self.per_minute)

    def _places(self) -> range:
        return range(self.at + 2, self.at + NUMBERS, 2)

    def _place(self, time: float) -> int:
        """Where that second is counted: its number, and behind it what was begun in it."""
        return self._places()[int(time) % _SECONDS]
