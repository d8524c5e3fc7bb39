"""GEdit-Bench v1 (Step1X-Edit, arXiv 2504.17761)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from retouch.data.rows import Row, Rows
from retouch.data.sources.hub import read_hub
from retouch.types import Column
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite, published
from retouch_judge.rewards import VieScore


class GEditSuite(RowSuite):
    """GEdit-Bench v1: real users' edits of real photographs, in 11 groups, with English and Chinese instructions."""

    language: Literal["en", "cn"] = "en"
    """Language of the instructions; each language gives a separate result."""
    subset: Literal["full", "intersection"] = "full"
    """``full``: all rows of the language; ``intersection``: only the rows marked ``Intersection_exist``, which all models
    compared in the paper edited."""

    name: ClassVar[str] = "gedit"
    title: ClassVar[str] = "GEdit-Bench v1"
    source: ClassVar[str] = "https://huggingface.co/datasets/stepfun-ai/GEdit-Bench"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[int] = 606
    protocol: ClassVar[str] = (
        "One edit of each source image. VIEScore gives SC = min(success, restraint) and PQ = min(naturalness, cleanness), 0 to 10; "
        "overall = sqrt(SC x PQ) of each image. Each column is averaged in each of the 11 groups (task_type), and then over groups."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of VIEScore's criteria and scales.",
        "The judge sees the original source image (input_image_raw); the published script shows its 512-pixel copy (input_image).",
        "An unreadable answer is missing; the published script repairs answers, and gives random scores if it cannot repair them.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {name: VieScore.columns[name] for name in ("sc", "pq", "overall")}
    headline_column: ClassVar[str] = "overall"
    average = "categories"
    on_hub: ClassVar[bool] = True
    judged_by = VieScore
    layout: ClassVar[str] = "give the data set stepfun-ai/GEdit-Bench: its id, or a folder of it"

    def rows(self, data: Path) -> Rows:
        """Read the split ``train``, which contains the benchmark."""
        return read_hub(data, split="train", columns={"instruction": "instruction", "image": "input_image_raw"}, name="gedit")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, if the row has the chosen language and belongs to the subset."""
        if published(row, "instruction_language") != self.language:
            return None
        marked = row.meta.get("Intersection_exist")
        if not isinstance(marked, bool):
            raise ValueError("'Intersection_exist': should be true or false")
        if self.subset == "intersection" and not marked:
            return None
        return SuiteItem(id=published(row, "key"), prompt=row.instruction, category=published(row, "task_type"), cluster=row.source)
