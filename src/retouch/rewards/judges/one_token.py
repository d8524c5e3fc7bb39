"""Judges with one-token answers: the probability of "yes", and the expected digit. Both are computed from the first token's
log-probabilities, or from repeated answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import Prompt, edit_parts, image_parts, quoted, rubric
from retouch.rewards.vlm.forms import ChoiceForm, Form, WordForm
from retouch.types import Column, Sample, Scores


class YesReward(JudgeReward):
    """The probability that the judge answers yes to the question whether the image fulfils the instruction. It needs
    log-probabilities, or repeated answers.

    Column ``yes``, 0 to 1: p(yes) / (p(yes) + p(no)). Tasks with and without a source image have different rubrics.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.Yes(judge=judge, by="choice", n_evals=5).n_evals
        5
    """

    kind: Literal["yes"] = "yes"
    min_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Minimum total probability of yes and no; with less the score is missing."""
    by: Literal["probability", "choice"] = "probability"
    """``probability``: use the first token's log-probabilities. ``choice``, for endpoints without log-probabilities: use the share
    of yes among ``n_evals`` answers."""

    columns: ClassVar[Mapping[str, Column]] = {"yes": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("yes", "generated-yes")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("yes", 2),)
    one_token: ClassVar[bool] = True

    @property
    def settings(self) -> str:
        """``min_mass``, or ``votes`` if ``by`` is ``choice``."""
        return _settings(self)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32."""
        import torch

        form = _form(self, "yes", {"no": 0.0, "yes": 1.0})
        verdicts = self.panel.judge([_yes(sample, form) for sample in samples])
        return {"yes": torch.tensor([float(verdict.mean("yes")) for verdict in verdicts])}


class DigitReward(JudgeReward):
    """The expected digit from 0 to 5, divided by 5 (Edit-R1, arXiv 2510.16888). It needs log-probabilities, or repeated answers.

    Column ``digit``, 0 to 1. ``task.meta["requirement"]`` is an optional description of a good edit, from the data set.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.Digit(judge=judge).by
        'probability'
    """

    kind: Literal["digit"] = "digit"
    min_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Minimum total probability of the six digits; with less the score is missing."""
    by: Literal["probability", "choice"] = "probability"
    """``probability``: use the first token's log-probabilities. ``choice``, for endpoints without log-probabilities: use the mean
    of ``n_evals`` answers."""

    columns: ClassVar[Mapping[str, Column]] = {"digit": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("digit",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("digit", 2),)
    one_token: ClassVar[bool] = True
    needs_source = True

    @property
    def settings(self) -> str:
        """``min_mass``, or ``votes`` if ``by`` is ``choice``."""
        return _settings(self)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. Raises ValueError if a task has no source image."""
        import torch

        form = _form(self, "digit", {str(digit): digit / 5 for digit in range(6)})
        verdicts = self.panel.judge([_digit(sample, form) for sample in samples])
        return {"digit": torch.tensor([float(verdict.mean("digit")) for verdict in verdicts])}


def _settings(reward: YesReward | DigitReward) -> str:
    return f"min_mass {reward.min_mass:g}" if reward.by == "probability" else "votes"


def _form(reward: YesReward | DigitReward, name: str, values: Mapping[str, float]) -> Form:
    return WordForm(name, values, reward.min_mass) if reward.by == "probability" else ChoiceForm(name, values)


def _yes(sample: Sample, form: Form) -> Prompt:
    if not sample.task.images:
        return Prompt(rubric("generated-yes"), image_parts(sample, quoted("Prompt", sample.task.instruction)), form)
    return Prompt(rubric("yes"), edit_parts(sample, quoted("Instruction", sample.task.instruction)), form)


def _digit(sample: Sample, form: Form) -> Prompt:
    facts = [quoted("Instruction", sample.task.instruction)]
    if "requirement" in sample.task.meta:
        facts.append(quoted("Requirement", sample.task.meta["requirement"]))
    return Prompt(rubric("digit"), edit_parts(sample, *facts), form)
