"""Whether a completion thinks first and answers then: a check of form, as a function of the text and as a reward."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from retouch.rewards.text.written import written
from retouch.types import Column, Sample, Scores


def think_format(completion: str, *, opening: str = "<think>", closing: str = "</think>") -> float:
    """1.0 where the completion is ``opening``, a thought, ``closing`` and an answer, each mark once; else 0.0.

    Neither the thought nor the answer may be blank. A completion whose opening mark was part of the prompt is given with the mark
    put before it. ValueError: marks that are empty or equal.
    """
    if not opening or not closing or opening == closing:
        raise ValueError(f"the marks {opening!r} and {closing!r} must be two texts that differ")
    text = completion.strip()
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return 0.0
    thought, _, answer = text.removeprefix(opening).partition(closing)
    return float(bool(thought.strip()) and bool(answer.strip()))


class ThinkReward:
    """Column ``think_format``, 0 or 1: ``think_format`` of what the policy wrote. ValueError: marks that are none, or a sample for
    which nothing was written.
    """

    columns: Mapping[str, Column] = {"think_format": Column(0.0, 1.0)}
    reads_completions: Literal[True] = True

    def __init__(self, *, opening: str = "<think>", closing: str = "</think>") -> None:
        think_format("", opening=opening, closing=closing)
        self.opening, self.closing = opening, closing

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        texts = [written(sample) for sample in samples]
        return {"think_format": torch.tensor([think_format(t, opening=self.opening, closing=self.closing) for t in texts])}
