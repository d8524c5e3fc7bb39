"""The scale of a score: its bounds, and how a number on it may be written."""

import math
import re
from dataclasses import dataclass

_PLAIN = re.compile(r"(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,8})?")
_COMMA = re.compile(r"(?:0|[1-9][0-9]{0,2}),[0-9]{1,2}")


@dataclass(frozen=True, slots=True)
class Scale:
    """The numbers from ``low`` to ``high``; only whole numbers if ``whole``.

    Raises ValueError if ``low`` is not below ``high``, a bound is not finite, or a bound of a whole scale is not whole.

    Example: ``Scale(0, 10, whole=True)``
    """

    low: float
    high: float
    whole: bool = False

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"a scale from {self.low} to {self.high}: low must be below high, and both finite")
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"a scale of whole numbers from {self.low} to {self.high}: its bounds must be whole")

    def admit(self, value: float) -> float | None:
        """Return the value, or None if it is not on the scale; a value is never clamped."""
        if not math.isfinite(value) or not self.low <= value <= self.high:
            return None
        return None if self.whole and value != math.floor(value) else value

    def read(self, figure: str, *, decimal_comma: bool = False) -> float | None:
        """Parse a number of ASCII digits with a decimal point, or with a comma if ``decimal_comma``. None for other texts, and for
        numbers that are not on the scale."""
        if _PLAIN.fullmatch(figure):
            return self.admit(float(figure))
        if decimal_comma and _COMMA.fullmatch(figure):
            return self.admit(float(figure.replace(",", ".")))
        return None

    def is_top(self, figure: str) -> bool:
        """Return whether a fraction's denominator is the maximum of the scale: 7/10 is not an answer on a scale up to 5."""
        return _PLAIN.fullmatch(figure) is not None and float(figure) == self.high
