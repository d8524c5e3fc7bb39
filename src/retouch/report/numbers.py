"""How the report writes numbers."""

import math
from collections.abc import Iterable

MINUS = "\u2212"
MISSING = "\u2013"


def short(value: float | int | None) -> str:
    """At most three significant digits beyond the point, an exponent only where it is needed; a dash where there is no number."""
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
    """A tick's number with as many decimals as tell neighbours ``gap`` apart from each other."""
    if value == 0:
        return "0"
    size = max(abs(value), gap)
    if size < 1e-3 or size >= 1e5:
        return short(value)
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    return _minus(f"{value:.{decimals}f}")


def brief(value: float) -> str:
    """At most three significant digits, without zeros at the end: for the small print under a picture."""
    return _minus(f"{value:.3g}")


def decimals_for(values: Iterable[float | None]) -> int:
    """How many decimals tell these scores apart: three where none is larger than 1, else two."""
    return 3 if all(value is None or not abs(value) > 1 for value in values) else 2


def score(value: float | None, decimals: int = 2) -> str:
    """A fixed number of decimals, as tables of scores have it."""
    return MISSING if value is None or not math.isfinite(value) else _minus(f"{value:.{decimals}f}")


def signed(value: float | None, decimals: int = 2) -> str:
    """The same with a sign; an exact zero, or what rounds to it, has none."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = f"{value:+.{decimals}f}"
    return rounded.lstrip("+-") if float(rounded) == 0 else _minus(rounded)


def percent(share: float) -> str:
    return _minus(f"{100 * share:.0f}") + " %"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _minus(written: str) -> str:
    return written.replace("-", MINUS)
