"""The base class of judges that score with the rubrics and scales of a published suite."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from retouch.types import Sample, Scores
from retouch_judge.base import NAN, JudgeReward, Prompt


class RubricReward(JudgeReward):
    """A judge whose answers are its columns: each name in the form of a prompt is a column.

    A column is NaN if no prompt of the sample asks for it, or if the answer is missing. Repeated answers are averaged.
    """

    @abstractmethod
    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        """Yield the prompts about a sample. Raises ValueError if its task lacks data that they need."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32."""
        import torch

        prompts = [list(self.prompts(sample)) for sample in samples]
        verdicts = iter(self.panel.judge([prompt for each in prompts for prompt in each]))
        scores = {name: torch.full((len(samples),), NAN) for name in self.columns}
        for row, each in enumerate(prompts):
            for _ in each:
                for name, answers in next(verdicts).scores.items():
                    scores[name][row] = answers.mean()
        return scores
