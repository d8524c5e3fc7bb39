"""The judge of system A: alignment, quality and identity, each 0 to 1. Each aspect has its own question and averages several
answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from retouch.config.section import Count
from retouch.rewards.facts import TaskFacts
from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import Prompt, edit_parts, image_parts, quoted, rubric
from retouch.rewards.vlm.answers.wording import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores

Aspect: TypeAlias = Literal["alignment", "quality", "identity"]

_IMAGES: Mapping[Aspect, int] = {"alignment": 2, "quality": 1, "identity": 2}


class AspectsReward(JudgeReward):
    """The judge of system A: one question and one column, 0 to 1, for each aspect.

    ``alignment``: whether the image follows the instruction. ``quality``: the quality of the image, without the instruction.
    ``identity``: whether everything that should not change is unchanged. Tasks without a source image are text-to-image prompts,
    which have no identity.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.Aspects(judge=judge, aspects=("alignment", "quality")).columns)
        ['alignment', 'quality']
    """

    kind: Literal["aspects"] = "aspects"
    n_evals: Count = 3
    """Number of answers to each question, each with its own seed. A score is their mean; it is missing if one answer is missing."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.7
    """Sampling temperature of the answers. At 0 all answers are the same, so ``n_evals`` must be 1."""
    aspects: Annotated[tuple[Aspect, ...], Field(min_length=1)] = ("alignment", "quality", "identity")
    """The aspects to ask for; ``identity`` needs a source image."""

    rubrics: ClassVar[tuple[str, ...]] = ("alignment", "generated-alignment", "quality", "identity")

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.aspects)) != len(self.aspects):
            raise ValueError(f"aspects {list(self.aspects)}: give each aspect at most once")
        return self

    @property
    def columns(self) -> Mapping[str, Column]:  # type: ignore[override]
        """One column for each aspect."""
        return {aspect: Column(0.0, 1.0) for aspect in self.aspects}

    @property
    def questions(self) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        """One question for each aspect."""
        return tuple((aspect, _IMAGES[aspect]) for aspect in self.aspects)

    @property
    def settings(self) -> str:
        """The names of the aspects."""
        return ", ".join(self.aspects)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for ``identity`` if a task has no source image."""
        import torch

        verdicts = iter(self.panel.judge([_prompt(aspect, sample) for aspect in self.aspects for sample in samples]))
        means = {aspect: [next(verdicts).mean(aspect) for _ in samples] for aspect in self.aspects}
        return {aspect: torch.tensor([float(mean) for mean in column]) for aspect, column in means.items()}

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Yield a message if ``identity`` is asked for and the tasks have no source images."""
        yield from super().task_problems(path, tasks)
        if "identity" in self.aspects and not tasks.has_source:
            none = f"{tasks.path}.kind {tasks.kind!r} has none"
            yield f"{path}.aspects: identity compares with a source image, but {none}; remove identity"


def _prompt(aspect: Aspect, sample: Sample) -> Prompt:
    form = ScoresForm({aspect: Scale(0, 1)})
    if aspect == "quality":
        return Prompt(rubric("quality"), image_parts(sample), form)
    if aspect == "alignment" and not sample.task.images:
        return Prompt(rubric("generated-alignment"), image_parts(sample, quoted("Prompt", sample.task.instruction)), form)
    return Prompt(rubric(aspect), edit_parts(sample, quoted("Instruction", sample.task.instruction)), form)
