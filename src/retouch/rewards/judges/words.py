"""Judges of one word: the probability of "yes", and the expected digit, from the first token's log-probabilities or from votes."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import torch

from retouch.rewards.judges.answers.forms import ChoiceForm, Form, WordForm
from retouch.rewards.judges.panel import OfPanel, Panel, Prompt
from retouch.rewards.judges.rubrics import edit_parts, picture_parts, quoted, rubric
from retouch.types import Column, Sample, Scores

By: TypeAlias = Literal["probability", "choice"]


class YesReward(OfPanel):
    """Column ``yes``, 0 to 1: p(yes) / (p(yes) + p(no)) as the answer to whether the task was done.

    NaN where the two words hold less than ``min_mass`` of the probability. Tasks with and without a source have their own rubric.
    ``by`` "choice" is for endpoints that give no log-probabilities: the share of yes among the panel's repeats.
    """

    columns: Mapping[str, Column] = {"yes": Column(0.0, 1.0)}
    rubrics = ("yes", "generated-yes")

    def __init__(self, panel: Panel, *, min_mass: float = 0.5, by: By = "probability") -> None:
        super().__init__(panel, settings=_settings(min_mass, by))
        self._form = _form("yes", {"no": 0.0, "yes": 1.0}, min_mass, by)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        verdicts = self.panel.judge([_yes(sample, self._form) for sample in samples])
        return {"yes": torch.tensor([float(verdict.mean("yes")) for verdict in verdicts])}


class DigitReward(OfPanel):
    """Column ``digit``, 0 to 1: the expected digit from 0 to 5, over 5 (Edit-R1, arXiv 2510.16888); one forward, no parser.

    ``task.meta["requirement"]``, where there is one, is what the data set says a good edit must look like. NaN where the six digits
    hold less than ``min_mass`` of the probability. ``by`` "choice" is for endpoints that give no log-probabilities: the mean of the
    digits that the panel's repeats gave. ValueError: a task without a source picture.
    """

    columns: Mapping[str, Column] = {"digit": Column(0.0, 1.0)}
    rubrics = ("digit",)

    def __init__(self, panel: Panel, *, min_mass: float = 0.5, by: By = "probability") -> None:
        super().__init__(panel, settings=_settings(min_mass, by))
        self._form = _form("digit", {str(digit): digit / 5 for digit in range(6)}, min_mass, by)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        verdicts = self.panel.judge([_digit(sample, self._form) for sample in samples])
        return {"digit": torch.tensor([float(verdict.mean("digit")) for verdict in verdicts])}


def _settings(min_mass: float, by: By) -> str:
    """What decides a score beside the rubric and the answers, for the judge's fingerprint."""
    return f"min_mass {min_mass:g}" if by == "probability" else "votes"


def _form(name: str, values: Mapping[str, float], min_mass: float, by: By) -> Form:
    if by not in get_args(By):
        raise ValueError(f"by {by!r}: choose {' or '.join(get_args(By))}")
    return WordForm(name, values, min_mass) if by == "probability" else ChoiceForm(name, values)


def _yes(sample: Sample, form: Form) -> Prompt:
    if not sample.task.images:
        return Prompt(rubric("generated-yes"), picture_parts(sample, quoted("Prompt", sample.task.instruction)), form)
    return Prompt(rubric("yes"), edit_parts(sample, quoted("Instruction", sample.task.instruction)), form)


def _digit(sample: Sample, form: Form) -> Prompt:
    facts = [quoted("Instruction", sample.task.instruction)]
    if "requirement" in sample.task.meta:
        facts.append(quoted("Requirement", sample.task.meta["requirement"]))
    return Prompt(rubric("digit"), edit_parts(sample, *facts), form)
