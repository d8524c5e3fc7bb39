"""Detect English texts that say that the judge scored on another scale than the requested one."""

import re
from collections.abc import Iterable

from retouch.rewards.vlm.answers.patterns import compiled
from retouch.rewards.vlm.answers.scales import Scale

_FIGURE = r"([0-9]+(?:\.[0-9]+)?)"
_MEASURE = r"(?:scor(?:es?|ed|ing)|rat(?:es?|ed|ings?)|grad(?:es?|ed|ing)|points?|marks?|scale[sd]?|maximum)"
_RANGE = rf"(?<![0-9.,:/-])[01]\s*(?:-|–|—|\bto\b|\bthrough\b|\.\.)\s*{_FIGURE}(?![0-9.]*[0-9:/-])"
# Each pattern has a group with the maximum of the scale that the text names.
_TOPS = compiled(
    "|".join(
        (
            rf"\b(?:{_MEASURE}|use|using)\b[^.\n]{{0,30}}?{_RANGE}",
            rf"{_RANGE}[^.\n]{{0,15}}\b{_MEASURE}\b",
            rf"\b{_FIGURE}[-\s](?:points?|stars?|steps?)[-\s](?:scale|system|rubric|rating|likert)",
            rf"\b{_MEASURE}\b[^.\n]{{0,60}}?\bout\s+of\s+{_FIGURE}",
            rf"\b(?:scale|maximum|top|max)\b\s*(?:score\s*)?(?:of|is|=|:)\s*{_FIGURE}",
        )
    ),
    re.IGNORECASE,
)
_TURNED = compiled(
    r"\b(?:lower|less|smaller) (?:\w+ )?(?:is|are|means?|=) better\b|\b(?:higher|more|larger) (?:\w+ )?(?:is|are|means?|=) worse\b"
    rf"|\b{_MEASURE}\b[^.\n]{{0,20}}\b(?:inverted|reversed)\b|\b(?:inverted|reversed?|inverse) {_MEASURE}\b"
    r"|\b(?:as|in) (?:an? )?(?:percent(?:ages?)?|tenths|permille)\b",
    re.IGNORECASE,
)


def is_elsewhere(text: str, scales: Iterable[Scale]) -> bool:
    """Return whether the text says that its scores are on a scale other than ``scales``, or that lower scores are better."""
    tops = {scale.high for scale in scales}
    named = (float(next(filter(None, match.groups()))) for match in _TOPS.finditer(text))
    return _TURNED.search(text) is not None or any(top not in tops for top in named)
