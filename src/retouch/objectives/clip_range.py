"""Checks that the clip range of a ratio fits the scale of the log-probabilities."""

import math
from typing import Literal


def check_clip(reduction: Literal["mean", "sum", "token"], low: float | None, high: float) -> None:
    """Raises ValueError if a clip range does not fit the scale of the log-probabilities; the message says what to do.

    ``reduction``: how a transition's log-probability was reduced over its D elements, or "token". A clip range of 0.2 on the sum
    corresponds to 0.2 / D on the mean, so a range chosen for one reduction clips never or always with the other. ``low``: None if
    the ratio has no lower bound.
    """
    if low is not None and not 0 <= low < 1:
        raise ValueError(f"clip range low {low}: the ratio is kept above 1 - low, so give 0 <= low < 1")
    if not 0 <= high < math.inf:
        raise ValueError(f"clip range high {high}: the ratio is kept below 1 + high, so give a finite high >= 0")
    if reduction not in ("mean", "sum", "token"):
        raise ValueError(f"reduction {reduction!r}: choose 'mean', 'sum' or 'token'")
    bounds = [high] if low is None else [low, high]
    shown = ", ".join(map(str, bounds))
    if reduction == "mean" and max(bounds) > 1e-2:
        raise ValueError(
            f"clip range {shown} on log-probabilities averaged over a transition's elements would never clip; "
            "use 1e-6 to 1e-4, or reduction 'sum'"
        )
    if reduction == "sum" and min(bounds) < 1e-3:
        raise ValueError(
            f"clip range {shown} on log-probabilities summed over a transition's elements would always clip; "
            "use about 0.2, or reduction 'mean'"
        )
