"""The reward of kind ``prompt_quality``: the five sub-scores of system C for a rewritten prompt. They are for monitoring, not for
training: a policy that is trained on them learns to write long prompts that contain "4k"."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar, Literal

from retouch.core.answers import answer_in
from retouch.rewards.base import RewardSection, completion_of
from retouch.types import Column, Sample, Scores

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_STOP_WORDS = frozenset(
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
    """The five sub-scores, each 0 to 1. ``total``: 0 to 5."""

    length: float
    keywords: float
    details: float
    quality_words: float
    sentence: float

    @property
    def total(self) -> float:
        """The sum of the five sub-scores."""
        return self.length + self.keywords + self.details + self.quality_words + self.sentence


def prompt_quality(original: str, enhanced: str) -> PromptQuality:
    """Compare the words of an enhanced prompt with the original prompt (in languages with spaces between words).

    ``length``: 1 if the enhanced prompt has more words. ``keywords``: the share of the original's words, without stop words, that
    are kept. ``details``: number of new words / 5, at most 1. ``quality_words``: 1 if it contains one of a few phrases of praise
    ("highly detailed", "4k"). ``sentence``: 1 if it has at least five words. Case is ignored.
    """
    before, after = _words(original), _words(enhanced)
    wanted = set(before) - _STOP_WORDS or set(before)
    new = set(after) - set(before) - _STOP_WORDS
    praise = any(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", enhanced.casefold()) for phrase in _PRAISE)
    return PromptQuality(
        length=float(len(after) > len(before)),
        keywords=len(wanted & set(after)) / len(wanted) if wanted else 1.0,
        details=min(len(new) / _DETAILS, 1.0),
        quality_words=float(praise),
        sentence=float(len(after) >= _SENTENCE),
    )


class PromptQualityReward(RewardSection):
    """The five sub-scores of system C for the prompt that a policy wrote, compared with the task's instruction. For monitoring: a
    policy that is trained on them learns to add "4k".

    ``length``, ``keywords``, ``details``, ``quality_words``, ``sentence``, each 0 to 1, as in ``prompt_quality``; ``total``, 0 to
    5. All are 0 if the completion contains no prompt.

    Example::

        >>> reward = retouch.rewards.PromptQuality()
        >>> retouch.score(reward, image, instruction="a cat", completion="a cat on a red sofa, soft light, 4k.")["total"] > 1
        True
    """

    kind: Literal["prompt_quality"] = "prompt_quality"

    columns: ClassVar[Mapping[str, Column]] = {
        **dict.fromkeys(("length", "keywords", "details", "quality_words", "sentence"), Column(0.0, 1.0)),
        "total": Column(0.0, 5.0),
    }
    reads_completions = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        rows = [self._points(sample.task.instruction, answer_in(completion_of(sample))) for sample in samples]
        table = torch.tensor(rows, dtype=torch.float32).view(len(samples), len(self.columns))
        return dict(zip(self.columns, table.unbind(dim=1), strict=True))

    def _points(self, original: str, enhanced: str | None) -> list[float]:
        if enhanced is None:
            return [0.0] * len(self.columns)
        points = prompt_quality(original, enhanced)
        return [*astuple(points), points.total]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
