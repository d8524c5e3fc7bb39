"""The playground as a suite: editing tasks with a known exact result, and a judge that measures the edit exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from retouch.config.section import Count
from retouch.data.base import Mixture
from retouch.rewards.base import RewardSection
from retouch.types import Column, Task
from retouch_bench.suite import BrokenItem, Suite, SuiteItem
from retouch_judge.models import JudgeModel
from retouch_worlds.data import PlaygroundData
from retouch_worlds.rewards import PlaygroundReward

if TYPE_CHECKING:
    from PIL.Image import Image


class PlaygroundSuite(Suite):
    """Editing tasks of the playground's test split, by number of edits in the instruction."""

    tasks: Count = 256
    """Number of tasks."""
    complexity: Mixture = Field(default={1: 1.0, 2: 1.0, 3: 1.0})
    """Weights of the numbers of edits in one instruction, 1 to 4. With equal weights, the numbers alternate."""
    filler: bool = False
    """Whether every instruction contains filler: words that request no edit."""
    task_seed: int = 0
    """Seed of the tasks."""

    name, title = "playground", "Playground"
    source, licence, size = "docs/playground.md", "Apache-2.0", 256
    protocol: ClassVar[str] = (
        "One edit of each of 256 generated scenes, 24 x 24 pixels, of the test split, which training never sees. The playground's "
        "exact judge measures what was done, what was kept and how it looks: overall = sqrt(min(IF, IP) x PQ). Mean over tasks."
    )
    task = "editing"
    needs_data = False
    columns: ClassVar[Mapping[str, Column]] = {
        name: column for name, column in PlaygroundReward.columns.items() if not column.diagnostic
    }
    headline_column: ClassVar[str] = "overall"

    @cached_property
    def _tasks(self) -> Sequence[Task]:
        data = PlaygroundData(
            seed=self.task_seed, count=self.tasks, complexity=self.complexity, filler=float(self.filler), split="test"
        )
        return data.tasks(in_turn=True)

    @cached_property
    def _by_id(self) -> Mapping[str, int]:
        return {task.id: index for index, task in enumerate(self._tasks)}

    def items(self, data: Path | None) -> tuple[list[SuiteItem], list[BrokenItem]]:
        if data is not None:
            raise ValueError(f"{data}: the playground's tasks are generated; leave --data out")
        items = []
        for task in self._tasks:
            edits = task.tags["complexity"]
            category = f"{edits} edit{'s' * (edits != '1')}"
            items.append(SuiteItem(id=task.id, prompt=task.instruction, category=category, fields=task.meta))
        return items, []

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return PlaygroundReward()

    def task_for(self, item: SuiteItem, *, turn: int = 0, previous: Image | None = None) -> Task:
        return self._tasks[self._by_id[item.id]]
