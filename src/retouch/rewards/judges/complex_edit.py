"""Complex-Edit's judge (arXiv 2504.13143): was it done, was the rest left alone, does it look well; whole numbers from 0 to 10."""

from collections.abc import Mapping, Sequence

import torch

from retouch.rewards.judges.answers.forms import ScoresForm
from retouch.rewards.judges.answers.scales import Scale
from retouch.rewards.judges.panel import NAN, OfPanel, Prompt, Verdict
from retouch.rewards.judges.rubrics import edit_parts, picture_parts, quoted, rubric
from retouch.types import Column, Sample, Scores, Task

_BANDS = Scale(0, 10, whole=True)


class ComplexEditReward(OfPanel):
    """Columns, each 0 to 10, the mean of the panel's repeats (the paper takes 20 of each picture), or NaN:

    - ``instruction_following``: how far it was done. Where ``task.meta["operations"]`` lists the atomic operations of a compound
      instruction, each has a number of its own and this is their mean.
    - ``identity_preservation``: how far the rest was left alone. ``perceptual_quality``: of the picture, without the instruction.
    - ``overall``: the mean of the three.

    ValueError: a task without a source picture, or operations that are no list of texts.
    """

    columns: Mapping[str, Column] = {
        name: Column(0.0, 10.0) for name in ("instruction_following", "identity_preservation", "perceptual_quality", "overall")
    }

    rubrics = ("complex-following", "complex-preservation", "complex-quality")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32."""
        kinds = (_following, _preservation, _quality)
        verdicts = iter(self.panel.judge([kind(sample) for kind in kinds for sample in samples]))
        table = torch.tensor([[_mean(next(verdicts)) for _ in samples] for _ in kinds], dtype=torch.float32).view(3, len(samples))
        names = list(self.columns)
        return dict(zip(names, [*table, table.mean(dim=0)], strict=True))


def operations(task: Task) -> list[str]:
    """The atomic operations of a compound instruction, or none."""
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
    return Prompt(rubric("complex-following"), edit_parts(sample, *facts), ScoresForm(dict.fromkeys(names, _BANDS)))


def _preservation(sample: Sample) -> Prompt:
    parts = edit_parts(sample, quoted("Instruction", sample.task.instruction))
    return Prompt(rubric("complex-preservation"), parts, ScoresForm({"preservation": _BANDS}))


def _quality(sample: Sample) -> Prompt:
    return Prompt(rubric("complex-quality"), picture_parts(sample), ScoresForm({"quality": _BANDS}))


def _mean(verdict: Verdict) -> float:
    """The mean over names and repeats; NaN where any is missing."""
    return float(torch.stack(list(verdict.scores.values())).mean()) if verdict.scores else NAN
