"""System C's five points for a rewritten prompt: to watch, not to train on, for a writer that is paid for them learns to be
long and to say "4k"."""

import re
from dataclasses import dataclass

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_FILLERS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "has", "he", "her", "his", "in", "is", "it", "its", "my"),
        *("of", "on", "or", "our", "she", "that", "the", "their", "them", "they", "this", "to", "was", "we", "with", "you"),
    )
)
_PRAISE = (
    *("high quality", "high-quality", "best quality", "highly detailed", "detailed", "intricate", "sharp focus", "high resolution"),
    *("4k", "8k", "hd", "uhd", "hdr", "photorealistic", "realistic", "professional", "masterpiece", "cinematic", "studio lighting"),
)
_DETAILS = 5
_SENTENCE = 5


@dataclass(frozen=True, slots=True)
class PromptQuality:
    """Each 0 to 1; ``total`` 0 to 5."""

    length: float
    keywords: float
    details: float
    quality_words: float
    sentence: float

    @property
    def total(self) -> float:
        """The sum of the five."""
        return self.length + self.keywords + self.details + self.quality_words + self.sentence


def prompt_quality(original: str, enhanced: str) -> PromptQuality:
    """How an enhanced prompt differs from the one it came from, by words (in languages that put spaces between them).

    ``length``: it has more words. ``keywords``: the share of the original's words, fillers aside, that it keeps. ``details``: new
    words, full marks from 5. ``quality_words``: it has one of a few phrases of praise ("highly detailed", "4k"). ``sentence``: it
    has 5 words or more. Upper and lower case are one.
    """
    before, after = _words(original), _words(enhanced)
    wanted = set(before) - _FILLERS or set(before)
    new = set(after) - set(before) - _FILLERS
    praise = any(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", enhanced.casefold()) for phrase in _PRAISE)
    return PromptQuality(
        length=float(len(after) > len(before)),
        keywords=len(wanted & set(after)) / len(wanted) if wanted else 1.0,
        details=min(len(new) / _DETAILS, 1.0),
        quality_words=float(praise),
        sentence=float(len(after) >= _SENTENCE),
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
