"""Ground score (EARL): how near a picture comes to the one that is known to be right; the source is not shown."""

from collections.abc import Mapping, Sequence

import torch

from retouch.rewards.judges.answers.forms import ScoresForm
from retouch.rewards.judges.answers.scales import Scale
from retouch.rewards.judges.panel import OfPanel, Prompt
from retouch.rewards.judges.rubrics import made, rubric
from retouch.types import Column, Sample, Scores


class GroundReward(OfPanel):
    """Column ``ground``, 0 to 10: the mean of the panel's repeats, or NaN. ValueError: a task without a target picture."""

    columns: Mapping[str, Column] = {"ground": Column(0.0, 10.0)}

    rubrics = ("ground",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        verdicts = self.panel.judge([_prompt(sample) for sample in samples])
        return {"ground": torch.tensor([float(verdict.mean("score")) for verdict in verdicts])}


def _prompt(sample: Sample) -> Prompt:
    if sample.task.target is None:
        raise ValueError(f"task {sample.task.id!r} has no target picture, to which the ground score compares")
    parts = ("The right picture:", sample.task.target, "The picture to judge:", made(sample))
    return Prompt(rubric("ground"), parts, ScoresForm({"score": Scale(0, 10)}))
