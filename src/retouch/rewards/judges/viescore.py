"""VIEScore (arXiv 2312.14867) and EditScore (arXiv 2509.23909): what was done, how it looks, and the geometric mean of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.panel import NAN, Prompt, Verdict
from retouch.rewards.judges.rubrics import edit_parts, image_parts, quoted, rubric
from retouch.rewards.vlm.answers.scales import Scale
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

    ``sc`` = min(success, restraint), what was done; ``pq`` = min(naturalness, cleanness), how it looks; ``overall`` = sqrt(sc pq).
    Each is taken of every answer, and then averaged. A task without a source image is a prompt for an image; its ``sc`` is the
    success alone. The four sub-scores are diagnostics, 0 to 10; ``restraint`` is NaN for a prompt.

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
        """Each column, (b,), float32; NaN if an answer is missing that the column needs."""
        semantic = [_semantic_or_prompt(sample) for sample in samples]
        verdicts = self.panel.judge([*semantic, *(_perceptual(sample, "vie-picture", 10) for sample in samples)])
        sc = _least(verdicts[: len(samples)], _SEMANTIC, self.panel.repeats)
        pq = _least(verdicts[len(samples) :], _PERCEPTUAL, self.panel.repeats)
        return _columns(sc, pq, (sc * pq).sqrt().mean(dim=1)) | _sub_scores(verdicts)


class EditScore(JudgeReward):
    """EditScore's version of VIEScore (arXiv 2509.23909), for judges that were tuned on it: the same columns, from scores out of
    25, also of the sub-scores.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.EditScore(judge=judge).columns)[:3]
        ['sc', 'pq', 'overall']
    """

    kind: Literal["editscore"] = "editscore"
    average: Literal["last", "first"] = "last"
    """``last``: the mean of the answers' overall scores; ``first``: the overall score of their means."""

    columns: ClassVar[Mapping[str, Column]] = _COLUMNS
    rubrics: ClassVar[tuple[str, ...]] = ("editscore-edit", "editscore-picture")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("editscore-edit", 2), ("editscore-picture", 1))
    needs_source = True

    @property
    def settings(self) -> str:
        """How repeats are averaged."""
        return f"average {self.average}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float32. ValueError: a task without a source image."""
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
    """The least of a verdict's scores, repeat by repeat; NaN if there is none."""
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
    """The mean over the answers of each sub-score, (b,); NaN where it is missing. ``verdicts``: b of what was done, then b
    of how it looks."""
    import torch

    half = len(verdicts) // 2
    parts = [(verdicts[:half], _SEMANTIC), (verdicts[half:], _PERCEPTUAL)]
    return {name: torch.stack([verdict.mean(name).float() for verdict in each]) for each, names in parts for name in names}
