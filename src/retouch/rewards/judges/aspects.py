"""System A's judge: alignment, quality and identity, each 0 to 1, each asked on its own, each the mean of a few answers."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import torch

from retouch.rewards.judges.answers.forms import ScoresForm
from retouch.rewards.judges.answers.scales import Scale
from retouch.rewards.judges.panel import OfPanel, Panel, Prompt
from retouch.rewards.judges.rubrics import edit_parts, picture_parts, quoted, rubric
from retouch.types import Column, Sample, Scores

Aspect: TypeAlias = Literal["alignment", "quality", "identity"]


class AspectsReward(OfPanel):
    """A column, 0 to 1, for each of ``aspects``; the mean of the panel's repeats (system A's n_evals, 3), or NaN.

    ``alignment``: the instruction is followed. ``quality``: of the picture alone. ``identity``: what was not asked to change is as
    it was. Tasks without a source picture are prompts for pictures, for which there is no identity.
    ValueError: an unknown aspect, none, or identity of a task without a source.
    """

    rubrics = ("alignment", "generated-alignment", "quality", "identity")

    def __init__(self, panel: Panel, *, aspects: Sequence[Aspect] = ("alignment", "quality", "identity")) -> None:
        if not aspects or len(set(aspects)) != len(aspects) or not set(aspects) <= set(get_args(Aspect)):
            raise ValueError(f"aspects {list(aspects)}: choose among {', '.join(get_args(Aspect))}, each at most once")
        super().__init__(panel, settings=", ".join(aspects))
        self.aspects = tuple(aspects)
        self.columns: Mapping[str, Column] = {aspect: Column(0.0, 1.0) for aspect in aspects}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32."""
        verdicts = iter(self.panel.judge([_prompt(aspect, sample) for aspect in self.aspects for sample in samples]))
        means = {aspect: [next(verdicts).mean(aspect) for _ in samples] for aspect in self.aspects}
        return {aspect: torch.tensor([float(mean) for mean in column]) for aspect, column in means.items()}


def _prompt(aspect: Aspect, sample: Sample) -> Prompt:
    form = ScoresForm({aspect: Scale(0, 1)})
    if aspect == "quality":
        return Prompt(rubric("quality"), picture_parts(sample), form)
    if aspect == "alignment" and not sample.task.images:
        return Prompt(rubric("generated-alignment"), picture_parts(sample, quoted("Prompt", sample.task.instruction)), form)
    return Prompt(rubric(aspect), edit_parts(sample, quoted("Instruction", sample.task.instruction)), form)
