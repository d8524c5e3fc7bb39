"""System C's five points for a rewritten prompt: to watch, not to train on, for a writer that is paid for them learns to be
long and to say "4k"."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch

from retouch.rewards.text.written import written
from retouch.types import Column, Sample, Scores

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


class PromptQualityReward:
    """``prompt_quality`` of the task's instruction and what the policy wrote: ``length``, ``keywords``, ``details``,
    ``quality_words``, ``sentence``, each 0 to 1, and ``total``, 0 to 5.

    ``answer``: finds the prompt in what was written (thoughts and tags come off); where it finds none, that is the policy's own
    fault: 0. ValueError: a sample for which nothing was written.
    """

    columns: Mapping[str, Column] = {
        **dict.fromkeys(("length", "keywords", "details", "quality_words", "sentence"), Column(0.0, 1.0)),
        "total": Column(0.0, 5.0),
    }
    reads_completions: Literal[True] = True

    def __init__(self, *, answer: Callable[[str], str | None] = str) -> None:
        self._answer = answer

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32."""
        rows = [self._points(sample.task.instruction, self._answer(written(sample))) for sample in samples]
        table = torch.tensor(rows, dtype=torch.float32).view(len(samples), len(self.columns))
        return dict(zip(self.columns, table.unbind(dim=1), strict=True))

    def _points(self, original: str, enhanced: str | None) -> list[float]:
        if enhanced is None:
            return [0.0] * len(self.columns)
        points = prompt_quality(original, enhanced)
        return [*astuple(points), points.total]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
