"""Series over steps and axis ranges: thinning, running means, ticks. No drawing."""

import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_POINTS = 240


class Point(NamedTuple):
    """The value ``y`` at step ``x``, with the ends of its band; NaN if missing."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan

    @property
    def span(self) -> list[float]:
        """The finite numbers among the value and the ends of its band."""
        return [value for value in (self.y, self.low, self.high) if math.isfinite(value)]


def average_points(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Average consecutive points, so that at most ``most`` points remain.

    The band of a mean of m independent points with half-widths h is sqrt(sum h^2) / m. Points without a value do not enter the
    mean.
    """
    return [_mean(part) for part in _parts(points, most)]


def average_with_envelope(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Average consecutive points, with their smallest and largest value as the band, so that no spike is lost."""
    thinned = []
    for part in _parts(points, most):
        values = [point.y for point in part if math.isfinite(point.y)]
        mean = _mean([Point(point.x, point.y) for point in part])
        thinned.append(mean._replace(low=min(values), high=max(values)) if len(values) > 1 else mean)
    return thinned


def running_mean(points: Sequence[Point], width: int) -> list[Point]:
    """The mean of the last ``width`` points up to each point; NaN for the first ``width`` - 1 points."""
    smooth = []
    for end, point in enumerate(points, start=1):
        window = [earlier.y for earlier in points[max(0, end - width) : end] if math.isfinite(earlier.y)]
        smooth.append(Point(point.x, math.fsum(window) / len(window) if end >= width and window else math.nan))
    return smooth


def axis_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return about ``about`` round numbers within the range, whose spacing is 1, 2 or 5 times a power of ten."""
    assert high > low, (low, high)
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    choices = [
        [number * gap for number in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]
        for gap in (factor * power for factor in (0.5, 1, 2, 5, 10))
    ]
    best = min(choices, key=lambda choice: abs(len(choice) - about))
    return [float(f"{tick:.12g}") for tick in best]


def integer_ticks(high: int, about: int = 6) -> list[float]:
    """Return integer ticks for an axis of steps from 0 to ``high``."""
    return [tick for tick in axis_ticks(0.0, float(high), about) if tick.is_integer()]


def padded_range(values: Sequence[float], *, share: float = 0.06) -> tuple[float, float]:
    """Return a range that contains the values with a margin: 0.5 to 1.5 times a constant, and 0 to 1 for no values or zeros."""
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return (0.0, 1.0) if high == 0 else (min(0.5 * low, 1.5 * low), max(0.5 * high, 1.5 * high))
    room = share * (high - low)
    # A quantity that is never negative gets no negative axis.
    return (low - room if low < 0 else max(0.0, low - room)), high + room


def _mean(part: Sequence[Point]) -> Point:
    x = math.fsum(point.x for point in part) / len(part)
    known = [point for point in part if math.isfinite(point.y)]
    if not known:
        return Point(x, math.nan)
    y = math.fsum(point.y for point in known) / len(known)
    half = math.sqrt(math.fsum((point.high - point.low) ** 2 for point in known)) / 2 / len(known)
    return Point(x, y, y - half, y + half)


def _parts(points: Sequence[Point], most: int) -> list[Sequence[Point]]:
    size = max(1, math.ceil(len(points) / most))
    return [points[start : start + size] for start in range(0, len(points), size)]
