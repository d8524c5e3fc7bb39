"""Detect English texts that say that the judge could not see the images, or that its score is only a placeholder."""

import re

from retouch.rewards.vlm.answers.patterns import compiled

_PICTURE = r"(?:image|picture|photo)s?"
_CANNOT = r"(?:cannot|can['’]?t|could not|couldn['’]t|unable to|not able to)"
_LOOK = r"(?:see|view|access|open|load|process|evaluate|assess|analy[sz]e|rate|score|judge|compare)"
_WHICH = r"(?:(?:the|any|an|either|both|your|these|those|two|of|edited|source|original|actual) )*"
_BLIND = compiled(
    "|".join(
        (
            # No image was received.
            rf"\bno (?:edited |source |second )?{_PICTURE}\b(?! (?:art[ei]facts?|noise|quality|defects?|issues?|changes?))"
            r"[^.]{0,20}\b(?:provided|attached|visible|shown|given|found|loaded)\b",
            rf"\b(?:no|without any) (?:(?:second|first|edited|source|other) )?{_PICTURE} "
            r"(?:was|were|is|are|came|has|have|arrived|received|here|to (?:see|judge|evaluate|compare))\b",
            rf"\b(?:i|we) (?:see|have|got|find|received) no {_PICTURE}",
            rf"\bthere (?:is|are|was|were) no (?:(?:second|edited|source) )?{_PICTURE}\b"
            r"(?=[^.]*\b(?:judge|evaluate|rate|score|compare|assess)|\s*[.,;)!]|\s*\Z)",
            rf"\((?:no|missing) (?:(?:second|edited|source) )?{_PICTURE}\)",
            rf"\b{_PICTURE} (?:is |are |was |were )?"
            r"(?:missing\b|not (?:provided|attached|visible|loaded|available|received|given)\b)",
            rf"\b{_PICTURE} (?:did not|didn['’]t|failed to|never|does not|doesn['’]t) (?:load|open|arrive|come through)\b",
            rf"\b{_PICTURE} (?:could not|couldn['’]t|cannot|can['’]?t) be "
            r"(?:loaded|opened|viewed|accessed|analy[sz]ed|processed|decoded|read)\b",
            r"\b(?:second|edited|source|other) (?:(?:one|image|picture|photo) )?(?:never|did not|didn['’]t) (?:arrive|come|load)",
            r"\bonly (?:see|have|got|received|given|was given) (?:one|a single)\b",
            r"\bonly (?:one|a single) (?:image|picture|photo) (?:was|is|has been|came)\b",
            # The judge cannot or will not look at the images.
            rf"\b{_CANNOT} {_LOOK} {_WHICH}{_PICTURE}",
            rf"\b(?:i|we) (?:{_CANNOT}|(?:wasn['’]t|was not|were not) able to|(?:was|were) unable to) {_LOOK}\b",
            rf"\A\W*(?:cannot|can['’]?t) {_LOOK}\b",
            r"\bas an ai\b|\bi['’]m sorry\b|\bi am sorry\b|\b(?:cannot|can['’]?t) (?:assist|help|comply)\b",
            # The number is a placeholder.
            r"\bplaceholder\b|\b(?:default|dummy|arbitrary|random) (?:score|value|rating|grade|number|answer)\b",
            r"\b(?:score|value|rating) by default\b|\bthis is (?:just |only )?a (?:default|guess|dummy)\b",
            r"\bassuming (?:average|neutral|a neutral|an average)\b",
        )
    ),
    re.IGNORECASE,
)


def is_blind(text: str) -> bool:
    """Return whether the text says that the judge could not see the images, or that its score is a placeholder."""
    return _BLIND.search(text) is not None
