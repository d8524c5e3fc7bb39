"""Measures preservation of the source outside the mask, with pixels and features, on any data of edits with masks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_folder
from retouch.rewards.base import PathText, RewardSection
from retouch.rewards.scorers.dino import DinoReward
from retouch.rewards.scorers.lpips import LpipsReward
from retouch.rewards.scorers.pixels import AppearanceReward
from retouch.rewards.several import SeveralRewards
from retouch.types import Column
from retouch_bench.suite import Scored, SuiteItem
from retouch_bench.suites.row_suite import RowSuite
from retouch_judge.base import NAN
from retouch_judge.models import JudgeModel


class PreservationSuite(RowSuite):
    """Measures how much of the source is preserved outside the mask."""

    lpips: PathText | None = None
    """Weights of LPIPS on AlexNet, one safetensors file (see the reward ``lpips``); null leaves the column out."""
    dino: PathText | None = None
    """Weights of DINOv2, a folder or an id in the Hugging Face cache; null leaves the column out."""

    name: ClassVar[str] = "preservation"
    title: ClassVar[str] = "Source preservation"
    source: ClassVar[str] = "https://arxiv.org/abs/2306.10012"
    licence: ClassVar[str] = "that of the user's data"
    size: ClassVar[int] = 0
    protocol: ClassVar[str] = (
        "One edit of each source image. Outside the mask (white is where to change): l1, the mean absolute difference of the "
        "colours to the source, 0 to 1, resized to the edit's size; lpips, the distance on AlexNet, at most 1; dino, the mean "
        "cosine of DINOv2's patches, at least 0. Each is averaged over images. Low l1 and lpips, and high dino, are better."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "No suite is published under this name. L1 and DINO are measures of MagicBrush on whole images, here outside the mask.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {
        "l1": Column(0.0, 1.0, higher_is_better=False),
        "lpips": Column(0.0, 1.0, diagnostic=True, higher_is_better=False),
        "dino": Column(0.0, 1.0, diagnostic=True),
    }
    headline_column: ClassVar[str] = "l1"
    layout: ClassVar[str] = "give a folder with metadata.jsonl, whose lines have file_name, instruction and mask"

    def rows(self, data: Path) -> Rows:
        """Read the rows of the folder."""
        return read_folder(data)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item. Raises ValueError for a row without a source image or a mask."""
        if not row.images or row.mask is None:
            raise ValueError("no source image or no mask; preservation is measured outside a mask")
        category = row.meta.get("category")
        return SuiteItem(
            id=row.id.replace("/", "-"),
            prompt=row.instruction,
            category=category if isinstance(category, str) else "",
            cluster=row.source,
        )

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return the measures of preservation; ``judge`` is ignored."""
        parts: dict[str, RewardSection] = {"pixels": AppearanceReward()}
        if self.lpips is not None:
            parts["lpips"] = LpipsReward(weights=self.lpips)
        if self.dino is not None:
            parts["dino"] = DinoReward(path=self.dino)
        return SeveralRewards(rewards=parts)

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        """Convert the preservation scores of the rewards to differences."""
        kept = given["pixels/preservation"]
        if kept != kept:
            return "the mask leaves nothing that should be preserved"
        return {
            "l1": 1 - kept,
            "lpips": 1 - given.get("lpips/preservation", NAN),
            "dino": given.get("dino/preservation", NAN),
        }
