"""Judges that say by which scale they score, where it is another than the one that was asked for. English."""

import re
from collections.abc import Iterable

from retouch.rewards.vlm.answers.patterns import compiled
from retouch.rewards.vlm.answers.scales import Scale

_FIGURE = r"([0-9]+(?:\.[0-9]+)?)"
_MEASURE = r"(?:scor(?:es?|ed|ing)|rat(?:es?|ed|ings?)|grad(?:es?|ed|ing)|points?|marks?|scale[sd]?|maximum)"
_RANGE = rf"(?<![0-9.,:/-])[01]\s*(?:-|–|—|\bto\b|\bthrough\b|\.\.)\s*{_FIGURE}(?![0-9.]*[0-9:/-])"
# Each gives the top that it names.
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
    """Whether the text says of its scores that their scale is none of these, or runs the other way."""
    tops = {scale.high for scale in scales}
    named = (float(next(filter(None, match.groups()))) for match in _TOPS.finditer(text))
    return _TURNED.search(text) is not None or any(top not in tops for top in named)
