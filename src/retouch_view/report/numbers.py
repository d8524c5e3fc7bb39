"""Formatting of numbers, and of tables for a terminal."""

import math
from collections.abc import Iterable, Sequence

MINUS = "\u2212"
MISSING = "\u2013"


def format_number(value: float | int | None) -> str:
    """Format with at most two decimals or, below 0.1, two significant digits; an exponent only if needed; a dash if missing."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e5:
        digits, _, exponent = f"{value:.1e}".partition("e")
        return _minus(f"{digits.removesuffix('.0')}e{int(exponent)}")
    if isinstance(value, int) or size >= 1000:
        return _minus(f"{value:.0f}")
    return _minus(f"{value:.2f}" if size >= 0.1 else f"{value:.2g}")


def tick_label(value: float, gap: float) -> str:
    """The label of an axis tick, with as many decimals as needed to distinguish ticks ``gap`` apart."""
    if value == 0:
        return "0"
    size = max(abs(value), gap)
    if size < 1e-3 or size >= 1e5:
        return format_number(value)
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    return _minus(f"{value:.{decimals}f}")


def format_brief(value: float) -> str:
    """Format with at most three significant digits and without trailing zeros, for captions."""
    return _minus(f"{value:.3g}")


def decimals_for(values: Iterable[float | None]) -> int:
    """Return how many decimals these scores need: three if no absolute value is above 1, otherwise two."""
    return 3 if all(value is None or not abs(value) > 1 for value in values) else 2


def format_score(value: float | None, decimals: int = 2) -> str:
    """Format with a fixed number of decimals, for tables of scores; a dash if the value is missing."""
    return MISSING if value is None or not math.isfinite(value) else _minus(f"{value:.{decimals}f}")


def format_signed(value: float | None, decimals: int = 2) -> str:
    """Format as ``format_score``, with a sign; a value that rounds to 0 gets no sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = f"{value:+.{decimals}f}"
    return rounded.lstrip("+-") if float(rounded) == 0 else _minus(rounded)


def format_percent(share: float) -> str:
    return _minus(f"{100 * share:.0f}") + " %"


def format_duration(seconds: float) -> str:
    """Format a duration in milliseconds, seconds, minutes or hours, depending on its length."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table. Numbers are right-aligned, except in the first column."""
    columns = range(max(map(len, rows)))
    widths = [max((len(row[place]) for row in rows if place < len(row)), default=0) for place in columns]
    return ["  " + "  ".join(_cell(cell, widths[place], place) for place, cell in enumerate(row)).rstrip() for row in rows]


def _minus(written: str) -> str:
    return written.replace("-", MINUS)


def _cell(cell: str, width: int, place: int) -> str:
    numeric = cell.replace(".", "", 1).replace("+", "", 1).replace("-", "", 1).replace(MINUS, "", 1).isdigit()
    return cell.rjust(width) if numeric and place else cell.ljust(width)
