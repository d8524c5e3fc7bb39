"""Multi-turn editing of any images: each turn edits the image of the previous turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_folder
from retouch.rewards.base import RewardSection
from retouch.rewards.scorers.pixels import AppearanceReward
from retouch.rewards.several import SeveralRewards
from retouch.types import Column
from retouch_bench.suite import Scored, SuiteItem, require_judge
from retouch_bench.suites.row_suite import RowSuite, texts_of
from retouch_judge.models import JudgeModel
from retouch_judge.rewards import VieScore

_SCORES = ("sc", "pq", "overall", "restraint")


class MultiTurnSuite(RowSuite):
    """Sequences of editing instructions, with the scores and the preservation of each turn."""

    name: ClassVar[str] = "multi-turn"
    title: ClassVar[str] = "Editing in turns"
    source: ClassVar[str] = "https://arxiv.org/abs/2505.20275"
    licence: ClassVar[str] = "that of the user's data"
    size: ClassVar[int] = 0
    protocol: ClassVar[str] = (
        "Each turn edits the image of the previous turn. VIEScore compares each turn with its own source image: sc = min(success, "
        "restraint), pq = min(naturalness, cleanness), overall = sqrt(sc x pq), 0 to 10; restraint is the preservation as scored "
        "by the judge. l1 is the mean absolute difference to the turn's source outside the mask, for items with a mask. Results "
        "are reported for each turn."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "No suite is published under this name; imgedit-multi-turn uses published instructions.",
    )
    task = "editing"
    turns: ClassVar[int] = 16
    columns: ClassVar[Mapping[str, Column]] = {
        **{name: VieScore.columns[name] for name in _SCORES},
        "l1": Column(0.0, 1.0, diagnostic=True, higher_is_better=False),
    }
    headline_column: ClassVar[str] = "overall"
    layout: ClassVar[str] = (
        "give a folder with metadata.jsonl, whose lines have file_name, instruction, later (a list of further instructions) and "
        "optionally mask (white: where any turn may change the image)"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of the folder."""
        return read_folder(data)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item with its later turns. Raises ValueError for a row without a source image or later instructions."""
        if not row.images:
            raise ValueError("no source image")
        later = texts_of(row.meta.get("later"), "later")
        if len(later) >= self.turns:
            raise ValueError(f"'later': {len(later)} instructions; give at most {self.turns - 1}")
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, later=tuple(later), cluster=row.source)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return VIEScore and the pixel difference. Raises ValueError without a judge."""
        return SeveralRewards(rewards={"vie": VieScore(judge=require_judge(self, judge)), "pixels": AppearanceReward()})

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        """Return the scores of the judge, and the pixel difference."""
        return {**{name: given[f"vie/{name}"] for name in _SCORES}, "l1": 1 - given["pixels/preservation"]}
