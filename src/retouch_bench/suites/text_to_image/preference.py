"""Human-preference and aesthetic scores on a list of prompts (DrawBench, the test prompts of PickScore or HPSv2, or your own)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_prompts
from retouch.rewards.base import PathText, RewardSection
from retouch.rewards.scorers.clip import AestheticReward, HpsReward, PickScoreReward
from retouch.types import Column
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite
from retouch_judge.models import JudgeModel

_PROMPTS = "The user provides the prompts, so results are comparable only for the same file."


class PromptListSuite(RowSuite):
    """A list of prompts, scored by one reward model. Derived classes choose the model."""

    licence: ClassVar[str] = "that of the user's prompts"
    size: ClassVar[int] = 0
    deviations: ClassVar[tuple[str, ...]] = (_PROMPTS,)
    task = "text-to-image"
    layout: ClassVar[str] = (
        "give a list of prompts: .txt with one per line, .jsonl with prompt and optionally category, or .csv with Prompts and "
        "Category, as in DrawBench"
    )

    def rows(self, data: Path) -> Rows:
        """Read the prompts of the file."""
        columns = {"instruction": "Prompts"} if data.suffix == ".csv" else {}
        return read_prompts(data, columns=columns, name=data.stem)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with its category if the file has one."""
        category = row.meta.get("category", row.meta.get("Category"))
        return SuiteItem(
            id=row.id.replace("/", "-"), prompt=row.instruction, category=category if isinstance(category, str) else ""
        )


class PickScoreSuite(PromptListSuite):
    """PickScore on a list of prompts."""

    path: PathText = "yuvalkirstain/PickScore_v1"
    """Folder of the weights, or their id in the Hugging Face cache."""

    name: ClassVar[str] = "pickscore"
    title: ClassVar[str] = "PickScore"
    source: ClassVar[str] = "https://arxiv.org/abs/2305.01569"
    protocol: ClassVar[str] = (
        "One image of each prompt; the mean PickScore, about 18 to 24. Some papers report it divided by 26, others divided by 100."
    )
    columns: ClassVar[Mapping[str, Column]] = PickScoreReward.columns
    headline_column: ClassVar[str] = "pickscore"

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return PickScore; ``judge`` is ignored."""
        return PickScoreReward(path=self.path)


class HpsSuite(PromptListSuite):
    """HPSv2 on a list of prompts."""

    path: PathText
    """Folder of the weights, or their id in the Hugging Face cache (see the reward ``hps``)."""

    name: ClassVar[str] = "hpsv2"
    title: ClassVar[str] = "HPSv2"
    source: ClassVar[str] = "https://arxiv.org/abs/2306.09341"
    protocol: ClassVar[str] = (
        "One image of each prompt; the mean HPSv2, a cosine. The published benchmark has 3200 prompts in four styles, which the "
        "column category of the file may name, and reports the score times 100."
    )
    columns: ClassVar[Mapping[str, Column]] = HpsReward.columns
    headline_column: ClassVar[str] = next(iter(HpsReward.columns))

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return HPSv2; ``judge`` is ignored."""
        return HpsReward(path=self.path)


class AestheticSuite(PromptListSuite):
    """LAION aesthetic rating on a list of prompts."""

    head: PathText
    """The layers of the aesthetic predictor, a safetensors file (see the reward ``aesthetic``)."""
    path: PathText = "openai/clip-vit-large-patch14"
    """The CLIP model for which the head was trained."""

    name: ClassVar[str] = "aesthetic"
    title: ClassVar[str] = "LAION aesthetics"
    source: ClassVar[str] = "https://arxiv.org/abs/2210.08402"
    protocol: ClassVar[str] = "One image of each prompt; the mean rating, 0 to 10. The rating ignores the prompt."
    columns: ClassVar[Mapping[str, Column]] = AestheticReward.columns
    headline_column: ClassVar[str] = "aesthetic"

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return the aesthetic predictor; ``judge`` is ignored."""
        return AestheticReward(head=self.head, path=self.path)
