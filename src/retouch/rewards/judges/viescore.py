"""VIEScore, and EditScore's version of it: what was done and how it looks, and the geometric mean of the two."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.rewards.judges.answers.forms import ScoresForm
from retouch.rewards.judges.answers.scales import Scale
from retouch.rewards.judges.panel import NAN, OfPanel, Panel, Prompt, Verdict
from retouch.rewards.judges.rubrics import edit_parts, picture_parts, quoted, rubric
from retouch.types import Column, Sample, Scores

_DID = ("success", "restraint")
_LOOKS = ("naturalness", "cleanness")
_COLUMNS: Mapping[str, Column] = {name: Column(0.0, 10.0) for name in ("sc", "pq", "overall")}


class VieScore(OfPanel):
    """Columns, each 0 to 10: ``sc`` = min(success, restraint), ``pq`` = min(naturalness, cleanness), ``overall`` = sqrt(sc pq).

    Of every repeat, and then the mean over them (VIEScore, arXiv 2312.14867). A task without a source picture is a prompt for a
    picture, of which ``sc`` is the success alone.
    """

    columns = _COLUMNS
    rubrics = ("vie-edit", "vie-prompt", "vie-picture")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32; NaN where an answer is missing that the column needs."""
        did = [_did(sample) for sample in samples]
        verdicts = self.panel.judge([*did, *(_looks(sample, "vie-picture", 10) for sample in samples)])
        sc = _least(verdicts[: len(samples)], _DID, self.panel.repeats)
        pq = _least(verdicts[len(samples) :], _LOOKS, self.panel.repeats)
        return _columns(sc, pq, (sc * pq).sqrt().mean(dim=1))


class EditScore(OfPanel):
    """The same columns from scores out of 25, divided by 2.5 (EditScore, arXiv 2509.23909), for judges that were tuned on it.

    ``average``: "last" takes the mean of the repeats' overall scores, "first" the overall of the mean scores. ValueError: another.
    """

    columns = _COLUMNS
    rubrics = ("editscore-edit", "editscore-picture")

    def __init__(self, panel: Panel, *, average: Literal["last", "first"] = "last") -> None:
        if average not in ("last", "first"):
            raise ValueError(f'average {average!r}: "last" or "first"')
        super().__init__(panel, settings=f"average {average}")
        self.average = average

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32. ValueError: a task without a source picture."""
        did = [_edit(sample, "editscore-edit", 25) for sample in samples]
        verdicts = self.panel.judge([*did, *(_looks(sample, "editscore-picture", 25) for sample in samples)])
        sc = _least(verdicts[: len(samples)], _DID, self.panel.repeats) / 2.5
        pq = _least(verdicts[len(samples) :], _LOOKS, self.panel.repeats) / 2.5
        overall = (sc * pq).sqrt().mean(dim=1) if self.average == "last" else (sc.mean(dim=1) * pq.mean(dim=1)).sqrt()
        return _columns(sc, pq, overall)


def _did(sample: Sample) -> Prompt:
    if sample.task.images:
        return _edit(sample, "vie-edit", 10)
    form = ScoresForm({"success": Scale(0, 10)})
    return Prompt(rubric("vie-prompt"), picture_parts(sample, quoted("Prompt", sample.task.instruction)), form)


def _edit(sample: Sample, text: str, top: int) -> Prompt:
    form = ScoresForm({name: Scale(0, top) for name in _DID})
    return Prompt(rubric(text), edit_parts(sample, quoted("Instruction", sample.task.instruction)), form)


def _looks(sample: Sample, text: str, top: int) -> Prompt:
    return Prompt(rubric(text), picture_parts(sample), ScoresForm({name: Scale(0, top) for name in _LOOKS}))


def _least(verdicts: Sequence[Verdict], names: Sequence[str], repeats: int) -> Float[Tensor, "b n"]:
    """The least of a verdict's scores, repeat by repeat; NaN where there is none."""
    rows = torch.full((len(verdicts), repeats), NAN, dtype=torch.float64)
    for row, verdict in enumerate(verdicts):
        given = [verdict.scores[name] for name in names if name in verdict.scores]
        if given:
            rows[row] = torch.stack(given).amin(dim=0)
    return rows


def _columns(sc: Float[Tensor, "b n"], pq: Float[Tensor, "b n"], overall: Float[Tensor, " b"]) -> Scores:
    return {"sc": sc.mean(dim=1).float(), "pq": pq.mean(dim=1).float(), "overall": overall.float()}
