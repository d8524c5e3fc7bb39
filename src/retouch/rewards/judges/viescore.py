"""VIEScore (arXiv 2312.14867) and EditScore (arXiv 2509.23909): semantic consistency, perceptual quality, and their geometric
mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import NAN, Prompt, Verdict, edit_parts, image_parts, quoted, rubric
from retouch.rewards.vlm.answers.wording import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_SEMANTIC = ("success", "restraint")
_PERCEPTUAL = ("naturalness", "cleanness")
_COLUMNS: Mapping[str, Column] = {
    **{name: Column(0.0, 10.0) for name in ("sc", "pq", "overall")},
    **{name: Column(0.0, 10.0, diagnostic=True) for name in (*_SEMANTIC, *_PERCEPTUAL)},
}


class VieScore(JudgeReward):
    """VIEScore (arXiv 2312.14867). Columns, each 0 to 10:

    ``sc`` = min(success, restraint), semantic consistency; ``pq`` = min(naturalness, cleanness), perceptual quality; ``overall`` =
    sqrt(sc pq). Each is computed for every answer, and then averaged. A task without a source image is a text-to-image prompt; its
    ``sc`` is the success alone. The four sub-scores are diagnostics, 0 to 10; ``restraint`` is NaN for a text-to-image prompt.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.VieScore(judge=judge).columns)[:3]
        ['sc', 'pq', 'overall']
    """

    kind: Literal["viescore"] = "viescore"

    columns: ClassVar[Mapping[str, Column]] = _COLUMNS
    rubrics: ClassVar[tuple[str, ...]] = ("vie-edit", "vie-prompt", "vie-picture")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("vie-edit", 2), ("vie-picture", 1))

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32; NaN if an answer that the column needs is missing."""
        semantic = [_semantic_or_prompt(sample) for sample in samples]
        verdicts = self.panel.judge([*semantic, *(_perceptual(sample, "vie-picture", 10) for sample in samples)])
        sc = _least(verdicts[: len(samples)], _SEMANTIC, self.panel.repeats)
        pq = _least(verdicts[len(samples) :], _PERCEPTUAL, self.panel.repeats)
        return _columns(sc, pq, (sc * pq).sqrt().mean(dim=1)) | _sub_scores(verdicts)


class EditScore(JudgeReward):
    """EditScore's version of VIEScore (arXiv 2509.23909), for judges that were fine-tuned for it. It has the columns of VIEScore, 0
    to 10; the judge answers with scores from 0 to 25, which are divided by 2.5.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.EditScore(judge=judge).columns)[:3]
        ['sc', 'pq', 'overall']
    """

    kind: Literal["editscore"] = "editscore"
    average: Literal["last", "first"] = "last"
    """``last``: the mean of the answers' overall scores; ``first``: the overall score of the answers' mean ``sc`` and ``pq``."""

    columns: ClassVar[Mapping[str, Column]] = _COLUMNS
    rubrics: ClassVar[tuple[str, ...]] = ("editscore-edit", "editscore-picture")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("editscore-edit", 2), ("editscore-picture", 1))
    needs_source = True

    @property
    def settings(self) -> str:
        """The value of ``average``."""
        return f"average {self.average}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no source image."""
        semantic = [_semantic(sample, "editscore-edit", 25) for sample in samples]
        verdicts = self.panel.judge([*semantic, *(_perceptual(sample, "editscore-picture", 25) for sample in samples)])
        sc = _least(verdicts[: len(samples)], _SEMANTIC, self.panel.repeats) / 2.5
        pq = _least(verdicts[len(samples) :], _PERCEPTUAL, self.panel.repeats) / 2.5
        overall = (sc * pq).sqrt().mean(dim=1) if self.average == "last" else (sc.mean(dim=1) * pq.mean(dim=1)).sqrt()
        return _columns(sc, pq, overall) | {name: scores / 2.5 for name, scores in _sub_scores(verdicts).items()}


def _semantic_or_prompt(sample: Sample) -> Prompt:
    if sample.task.images:
        return _semantic(sample, "vie-edit", 10)
    form = ScoresForm({"success": Scale(0, 10)})
    return Prompt(rubric("vie-prompt"), image_parts(sample, quoted("Prompt", sample.task.instruction)), form)


def _semantic(sample: Sample, name: str, top: int) -> Prompt:
    form = ScoresForm({part: Scale(0, top) for part in _SEMANTIC})
    return Prompt(rubric(name), edit_parts(sample, quoted("Instruction", sample.task.instruction)), form)


def _perceptual(sample: Sample, name: str, top: int) -> Prompt:
    return Prompt(rubric(name), image_parts(sample), ScoresForm({part: Scale(0, top) for part in _PERCEPTUAL}))


def _least(verdicts: Sequence[Verdict], names: Sequence[str], repeats: int) -> Float[Tensor, "b n"]:
    """Return the minimum of a verdict's scores in each repeat; NaN if there is none."""
    import torch

    rows = torch.full((len(verdicts), repeats), NAN, dtype=torch.float64)
    for row, verdict in enumerate(verdicts):
        given = [verdict.scores[name] for name in names if name in verdict.scores]
        if given:
            rows[row] = torch.stack(given).amin(dim=0)
    return rows


def _columns(sc: Float[Tensor, "b n"], pq: Float[Tensor, "b n"], overall: Float[Tensor, " b"]) -> Scores:
    return {"sc": sc.mean(dim=1).float(), "pq": pq.mean(dim=1).float(), "overall": overall.float()}


def _sub_scores(verdicts: Sequence[Verdict]) -> Scores:
    """Return the mean over the answers of each sub-score, (b,); NaN if it is missing. ``verdicts``: b verdicts on semantic
    consistency, then b verdicts on perceptual quality."""
    import torch

    half = len(verdicts) // 2
    parts = [(verdicts[:half], _SEMANTIC), (verdicts[half:], _PERCEPTUAL)]
    return {name: torch.tensor([float(verdict.mean(name)) for verdict in each]) for each, names in parts for name in names}
