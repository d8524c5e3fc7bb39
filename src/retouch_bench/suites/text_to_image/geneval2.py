"""GenEval 2 (arXiv 2512.16853): prompts of increasing compositionality, scored with Soft-TIFA."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_prompts
from retouch.types import Column, Json, Sample, Scores
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite, number_of, texts_of
from retouch_judge.base import JudgeReward, Prompt, image_parts, quoted, rubric
from retouch_judge.questions import WordForm

_FORM = WordForm("yes", {"no": 0.0, "yes": 1.0})


class SoftTifaJudge(JudgeReward):
    """Soft-TIFA (arXiv 2512.16853) on ``task.meta["vqa_list"]``, pairs of a question and its correct answer. The judge must return
    log-probabilities.

    Columns, 0 to 1: ``gm``, the geometric mean of the probabilities of the correct answers, which measures whole prompts; ``am``,
    the arithmetic mean, which measures single atoms. Both are NaN if an answer is missing.
    """

    columns: ClassVar[Mapping[str, Column]] = {"gm": Column(0.0, 1.0), "am": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("expected-answer",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("expected-answer", 1),)
    one_token: ClassVar[bool] = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for a task without questions."""
        import torch

        asked = [_pairs(sample.task.meta.get("vqa_list")) for sample in samples]
        prompts = [
            Prompt(rubric("expected-answer"), image_parts(sample, quoted("Question", pair[0]), quoted("Answer", pair[1])), _FORM)
            for sample, pairs in zip(samples, asked, strict=True)
            for pair in pairs
        ]
        verdicts = iter(self.panel.judge(prompts))
        means = [soft_tifa([float(next(verdicts).mean("yes")) for _ in pairs]) for pairs in asked]
        return {name: torch.tensor([mean[number] for mean in means]) for number, name in enumerate(self.columns)}


def soft_tifa(probabilities: Sequence[float]) -> tuple[float, float]:
    """Return the geometric and the arithmetic mean; both are NaN if a probability is NaN."""
    arithmetic = sum(probabilities) / len(probabilities)
    if math.isnan(arithmetic) or 0 in probabilities:
        return (arithmetic if math.isnan(arithmetic) else 0.0), arithmetic
    return math.exp(sum(map(math.log, probabilities)) / len(probabilities)), arithmetic


def _pairs(value: Json) -> list[list[str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("'vqa_list': should be a list of pairs of a question and its answer")
    pairs = [texts_of(pair, "vqa_list") for pair in value]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("'vqa_list': should be a list of pairs of a question and its answer")
    return pairs


class GenEval2Suite(RowSuite):
    """GenEval 2: 800 prompts. The licence forbids commercial use, and this package contains no row of the data."""

    name: ClassVar[str] = "geneval2"
    title: ClassVar[str] = "GenEval 2"
    source: ClassVar[str] = "https://github.com/facebookresearch/GenEval2"
    licence: ClassVar[str] = "CC BY-NC 4.0"
    size: ClassVar[int] = 800
    protocol: ClassVar[str] = (
        "One image of each prompt. For each atom of the prompt, the judge's probability that the published answer to the published "
        "question is right. gm is the geometric mean of an image's probabilities, am the arithmetic one; both are averaged over "
        "prompts."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge is asked whether the answer is right, and the probability of yes is used; the published script uses the "
        "probability of the words of the answer.",
    )
    task = "text-to-image"
    columns: ClassVar[Mapping[str, Column]] = SoftTifaJudge.columns
    headline_column: ClassVar[str] = "gm"
    judged_by = SoftTifaJudge
    layout: ClassVar[str] = "give geneval2_data.jsonl of the repository facebookresearch/GenEval2"

    def rows(self, data: Path) -> Rows:
        """Read the lines of the file."""
        return read_prompts(data / "geneval2_data.jsonl" if data.is_dir() else data, name="geneval2")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item with its questions, and the number of atoms as the category."""
        pairs: list[Any] = _pairs(row.meta.get("vqa_list"))
        return SuiteItem(
            id=row.id.replace("/", "-"),
            prompt=row.instruction,
            category=f"{number_of(row, 'atom_count')} atoms",
            fields={"vqa_list": pairs},
        )
