"""What a judge may answer: a number within bounds, and how it is written."""

import math
import re
from dataclasses import dataclass

_PLAIN = re.compile(r"(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,8})?")
_COMMA = re.compile(r"(?:0|[1-9][0-9]{0,2}),[0-9]{1,2}")


@dataclass(frozen=True, slots=True)
class Scale:
    """The numbers from ``low`` to ``high``, of which only the whole ones where ``whole``. ValueError: bounds that are none.

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
        """The value, or None if it is not on the scale (never clamped)."""
        if not math.isfinite(value) or not self.low <= value <= self.high:
            return None
        return None if self.whole and value != math.floor(value) else value

    def read(self, figure: str, *, decimal_comma: bool = False) -> float | None:
        """A written figure: digits of ASCII with a point, and where ``decimal_comma`` with a comma; None for any other."""
        if _PLAIN.fullmatch(figure):
            return self.admit(float(figure))
        if decimal_comma and _COMMA.fullmatch(figure):
            return self.admit(float(figure.replace(",", ".")))
        return None

    def is_top(self, figure: str) -> bool:
        """Whether a fraction's denominator is this scale's top: 7/10 is no answer on a scale to 5."""
        return _PLAIN.fullmatch(figure) is not None and float(figure) == self.high
