"""The ground score of EARL (arXiv 2508.01119): the closeness of an image to the task's target; the source is not shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import Prompt, judged_image, rubric
from retouch.rewards.vlm.answers.wording import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores


class GroundReward(JudgeReward):
    """Closeness of the image to the task's target image, as in EARL. Column ``ground``, 0 to 10.

    Source: EARL (arXiv 2508.01119).

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.Ground(judge=judge).columns)
        ['ground']
    """

    kind: Literal["ground"] = "ground"

    columns: ClassVar[Mapping[str, Column]] = {"ground": Column(0.0, 10.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("ground",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("ground", 2),)
    needs_target = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. Raises ValueError if a task has no target image."""
        import torch

        verdicts = self.panel.judge([_prompt(sample) for sample in samples])
        return {"ground": torch.tensor([float(verdict.mean("score")) for verdict in verdicts])}


def _prompt(sample: Sample) -> Prompt:
    if sample.task.target is None:
        raise ValueError(f"task {sample.task.id!r} has no target image, which the ground reward needs; use data with target images")
    parts = ("The right picture:", sample.task.target, "The picture to judge:", judged_image(sample))
    return Prompt(rubric("ground"), parts, ScoresForm({"score": Scale(0, 10)}))
