"""The reward of kind ``completion_quality``: a judge's score of the text that the policy wrote, without the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from retouch.rewards.base import completion_of
from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import Prompt, quoted, rubric
from retouch.rewards.vlm.answers.wording import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores

_LOW, _HIGH = 1.0, 5.0
_ASPECTS = ("relevance", "concreteness", "language")


class CompletionQualityReward(JudgeReward):
    """A judge's score of the text that the policy wrote, as a description for an image model. The judge sees the task's instruction
    and the text, and no image.

    ``relevance``, ``concreteness``, ``language``, each 1 to 5: how well the text serves the instruction, how exactly it says what
    is to be seen, and how clear its language is. ``completion``, 0 to 1: (mean of the three - 1) / 4. A blank text gets the lowest
    values, and the judge is not asked.

    This is the only reward that sends the policy's text to a judge. The text is quoted as data, and the rubric says that praise and
    orders in it are faults. A policy may still learn to write what this judge likes: read the completions of the run, and combine
    this reward with one that scores the image.

    Source: the option ``use_completion_quality_reward`` of system A's text-to-image script. It asks GPT-5 mini, and combines
    ``completion`` and the reward of the image with the weights 0.5 and 0.5.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-model", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.CompletionQuality(judge=judge).columns)
        ['relevance', 'concreteness', 'language', 'completion']
    """

    kind: Literal["completion_quality"] = "completion_quality"

    columns: ClassVar[Mapping[str, Column]] = {
        **dict.fromkeys(_ASPECTS, Column(_LOW, _HIGH)),
        "completion": Column(0.0, 1.0),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("completion",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("completion", 0),)
    reads_completions = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        texts = [completion_of(sample) for sample in samples]
        asked = [row for row, text in enumerate(texts) if text.strip()]
        table = torch.full((len(samples), len(_ASPECTS)), _LOW)
        verdicts = self.panel.judge([_prompt(samples[row].task.instruction, texts[row]) for row in asked])
        for row, verdict in zip(asked, verdicts, strict=True):
            table[row] = torch.stack([verdict.mean(name).float() for name in _ASPECTS])
        mean = (table.mean(dim=1) - _LOW) / (_HIGH - _LOW)
        return {**dict(zip(_ASPECTS, table.unbind(dim=1), strict=True)), "completion": mean}


def _prompt(instruction: str, text: str) -> Prompt:
    parts = (quoted("Request", instruction), quoted("Text", text))
    return Prompt(rubric("completion"), parts, ScoresForm(dict.fromkeys(_ASPECTS, Scale(_LOW, _HIGH))))
