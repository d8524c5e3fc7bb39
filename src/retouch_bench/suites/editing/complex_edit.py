"""Complex-Edit (arXiv 2504.13143)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from retouch.config.section import Count
from retouch.data.rows import Row, Rows
from retouch.data.sources.complex_edit import Levels, read_complex_edit
from retouch.rewards.base import RewardSection
from retouch.types import Column
from retouch_bench.suite import SuiteItem, require_judge
from retouch_bench.suites.row_suite import RowSuite
from retouch_judge.models import JudgeModel
from retouch_judge.rewards import ComplexEditReward


class ComplexEditSuite(RowSuite):
    """Complex-Edit: instructions that combine 1 to 8 atomic edits of the same image."""

    levels: Levels = "1-8"
    """Which levels of complexity: "8", "1-8" or "1,4,8". A level is the number of atomic edits in the instruction."""
    split: Literal["test_real", "test_syn"] = "test_real"
    """Real photographs, or generated images."""
    answers: Count = 20
    """Number of answers of the judge to each question; the score is their mean."""

    name: ClassVar[str] = "complex-edit"
    title: ClassVar[str] = "Complex-Edit"
    source: ClassVar[str] = "https://huggingface.co/datasets/UCSC-VLAA/Complex-Edit"
    licence: ClassVar[str] = "CC BY-NC 4.0"
    size: ClassVar[int] = 4248
    protocol: ClassVar[str] = (
        "One edit of each of 531 images at each of eight levels. The judge gives whole numbers from 0 to 10 for instruction "
        "following (IF, the mean over the atomic edits), identity preservation (IP) and perceptual quality (PQ, without the "
        "instruction), each the mean of 20 answers. Overall = (IF + IP + PQ) / 3 of each image. Results are reported for each "
        "level; the headline is the mean over the levels."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of the published criteria and bands.",
        "IF and IP are two questions; the published judge answers both in one.",
        "Overall is computed for each image; the published script combines scores of different images, because its workers finish "
        "in any order.",
        "The sequential mode of the paper, which edits step by step, is not implemented.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = ComplexEditReward.columns
    headline_column: ClassVar[str] = "overall"
    average = "categories"
    on_hub: ClassVar[bool] = True
    layout: ClassVar[str] = "give the data set UCSC-VLAA/Complex-Edit: its id, or a folder of it"

    def rows(self, data: Path) -> Rows:
        """Read the images of the split at all chosen ``levels``."""
        return read_complex_edit(data, complexity=self.levels, split=self.split)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with its level as the category."""
        image, _, level = row.id.rpartition("/")
        return SuiteItem(
            id=f"{image.rpartition('/')[2]}-level-{level}",
            prompt=row.instruction,
            category=f"level {level}",
            cluster=row.source,
            fields=row.meta,
        )

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return the reward of Complex-Edit. Raises ValueError without a judge."""
        temperature = 0.0 if self.answers == 1 else 1.0
        return ComplexEditReward(judge=require_judge(self, judge), n_evals=self.answers, temperature=temperature)
