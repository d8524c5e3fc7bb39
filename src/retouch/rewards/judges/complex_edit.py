"""Complex-Edit's judge (arXiv 2504.13143): instruction following, identity preservation and perceptual quality, whole numbers from
0 to 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import NAN, Prompt, Verdict, edit_parts, image_parts, quoted, rubric
from retouch.rewards.vlm.answers.wording import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores, Task

_WHOLE = Scale(0, 10, whole=True)


class ComplexEditReward(JudgeReward):
    """Complex-Edit's judge (arXiv 2504.13143, which averages 20 answers). Columns, each 0 to 10:

    ``instruction_following``: how well the image follows the instruction. If ``task.meta["operations"]`` lists the atomic
    operations of a compound instruction, each operation gets a score, and the column is their mean. ``identity_preservation``: how
    well everything else is preserved. ``perceptual_quality``: the quality of the image, without the instruction. ``overall``: the
    mean of the three.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.ComplexEdit(judge=judge, n_evals=20).columns["overall"].high
        10.0
    """

    kind: Literal["complex_edit"] = "complex_edit"

    columns: ClassVar[Mapping[str, Column]] = {
        name: Column(0.0, 10.0) for name in ("instruction_following", "identity_preservation", "perceptual_quality", "overall")
    }
    rubrics: ClassVar[tuple[str, ...]] = ("complex-following", "complex-preservation", "complex-quality")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (
        ("complex-following", 2),
        ("complex-preservation", 2),
        ("complex-quality", 1),
    )
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32.

        Raises ValueError if a task has no source image, or if its operations are not a list of texts.
        """
        import torch

        prompts = (_following, _preservation, _quality)
        verdicts = iter(self.panel.judge([prompt(sample) for prompt in prompts for sample in samples]))
        table = torch.tensor([[_mean(next(verdicts)) for _ in samples] for _ in prompts], dtype=torch.float32).view(3, len(samples))
        names = list(self.columns)
        return dict(zip(names, [*table, table.mean(dim=0)], strict=True))


def operations(task: Task) -> list[str]:
    """Return the atomic operations of a compound instruction; empty if the task lists none.

    Raises ValueError if they are not a list of texts.
    """
    listed = task.meta.get("operations", [])
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ValueError(f'task {task.id!r}: meta["operations"] must be a list of texts, one for each atomic operation')
    return [str(one) for one in listed]


def _following(sample: Sample) -> Prompt:
    listed = operations(sample.task)
    facts = [quoted("Instruction", sample.task.instruction)]
    names = ["following"]
    if listed:
        names = [f"following_{number}" for number in range(1, len(listed) + 1)]
        facts.append(quoted("Operations", {str(number): one for number, one in enumerate(listed, 1)}))
    return Prompt(rubric("complex-following"), edit_parts(sample, *facts), ScoresForm(dict.fromkeys(names, _WHOLE)))


def _preservation(sample: Sample) -> Prompt:
    parts = edit_parts(sample, quoted("Instruction", sample.task.instruction))
    return Prompt(rubric("complex-preservation"), parts, ScoresForm({"preservation": _WHOLE}))


def _quality(sample: Sample) -> Prompt:
    return Prompt(rubric("complex-quality"), image_parts(sample), ScoresForm({"quality": _WHOLE}))


def _mean(verdict: Verdict) -> float:
    """Return the mean over all names and repeats; NaN if any score is missing."""
    import torch

    return float(torch.stack(list(verdict.scores.values())).mean()) if verdict.scores else NAN
