"""The reward of kind ``thinking``: whether a completion has the format of a thought followed by an answer."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from retouch.rewards.base import RewardSection, completion_of
from retouch.types import Column, Sample, Scores


def think_format(completion: str, *, opening: str = "<think>", closing: str = "</think>") -> float:
    """1.0 if the completion is ``opening``, a thought, ``closing`` and an answer, with each mark exactly once; otherwise 0.0.

    Neither the thought nor the answer may be blank. If the prompt already ends with the opening mark, put the mark before the
    completion. Raises ValueError if a mark is empty or both are equal.

    Source: the format reward of DeepSeek-R1 (arXiv 2501.12948), ``think_format_reward`` in TRL.
    """
    _check_marks(opening, closing)
    text = completion.strip()
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return 0.0
    thought, _, answer = text.removeprefix(opening).partition(closing)
    return float(bool(thought.strip()) and bool(answer.strip()))


class ThinkReward(RewardSection):
    """Whether a completion is a thought followed by an answer. Column ``think_format``, 0 or 1, as computed by ``think_format``.

    Example::

        >>> retouch.score(retouch.rewards.Think(), image, completion="<think>red?</think>make it blue")
        {'think_format': 1.0}
    """

    kind: Literal["thinking"] = "thinking"
    opening: str = "<think>"
    """Mark before the thought."""
    closing: str = "</think>"
    """Mark after the thought."""

    columns: ClassVar[Mapping[str, Column]] = {"think_format": Column(0.0, 1.0)}
    reads_completions = True

    @model_validator(mode="after")
    def _two_marks(self) -> Self:
        _check_marks(self.opening, self.closing)
        return self

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        texts = [completion_of(sample) for sample in samples]
        return {"think_format": torch.tensor([think_format(t, opening=self.opening, closing=self.closing) for t in texts])}


def _check_marks(opening: str, closing: str) -> None:
    if not opening or not closing or opening == closing:
        raise ValueError(f"the marks `opening` {opening!r} and `closing` {closing!r} must differ and must not be empty")
