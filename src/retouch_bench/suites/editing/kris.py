"""KRIS-Bench (arXiv 2505.16707): edits that need world knowledge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from retouch.data.rows import Row, Rows
from retouch.types import Column, Sample
from retouch_bench.suite import Scored, SuiteItem
from retouch_bench.suites.row_suite import JoinedRows, RowSuite, file_rows, keyed_rows, published
from retouch_bench.suites.rubric_reward import RubricReward
from retouch_judge.base import NAN, Prompt, image_parts, judged_image, quoted, rubric
from retouch_judge.questions import Part, ScoresForm
from retouch_judge.wording import Scale

_FIVE = Scale(1, 5, whole=True)
_KNOWLEDGE = frozenset(
    {
        "abstract_reasoning",
        "biology",
        "chemistry",
        "geography",
        "humanities",
        "mathematics",
        "medicine",
        "physics",
        "practical_knowledge",
        "rule-based_reasoning",
    }
)
_NAMES = ("consistency", "instruction", "quality")


class KrisJudge(RubricReward):
    """The judge of KRIS-Bench. Columns, integers from 1 to 5: ``consistency``, ``instruction``, ``quality``, and ``knowledge``,
    which only knowledge categories have."""

    columns: ClassVar[Mapping[str, Column]] = {
        **{name: Column(1.0, 5.0) for name in _NAMES},
        "knowledge": Column(1.0, 5.0, diagnostic=True),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("five-consistency", "five-instruction", "five-knowledge", "five-quality")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("five-consistency", 2), ("five-knowledge", 2), ("five-quality", 1))
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        """Yield three questions. In a knowledge category, the second one also asks for the score ``knowledge``."""
        meta, instruction = sample.task.meta, quoted("Instruction", sample.task.instruction)
        explained = (instruction, quoted("Explanation", meta["explain"])) if meta.get("explain") else (instruction,)
        yield Prompt(rubric("five-consistency"), _shown(sample, instruction), ScoresForm({"consistency": _FIVE}))
        if meta.get("category") in _KNOWLEDGE:
            form = ScoresForm({"instruction": _FIVE, "knowledge": _FIVE})
            yield Prompt(rubric("five-knowledge"), _shown(sample, *explained), form)
        else:
            yield Prompt(rubric("five-instruction"), _shown(sample, *explained, target=True), ScoresForm({"instruction": _FIVE}))
        yield Prompt(rubric("five-quality"), image_parts(sample), ScoresForm({"quality": _FIVE}))


def _shown(sample: Sample, *facts: str, target: bool = False) -> tuple[Part, ...]:
    """Return the facts, all source images, the correct result (if ``target`` and the task has one), and the edited image."""
    parts: list[Part] = [*facts]
    for number, image in enumerate(sample.task.images, 1):
        parts += [f"Source picture {number}:", image]
    if target and sample.task.target is not None:
        parts += ["The right result:", sample.task.target]
    return (*parts, "Edited picture:", judged_image(sample))


class KrisSuite(RowSuite):
    """KRIS-Bench: 22 published tasks, from counting to chemistry."""

    name: ClassVar[str] = "kris"
    title: ClassVar[str] = "KRIS-Bench"
    source: ClassVar[str] = "https://github.com/mercurystraw/Kris_Bench"
    licence: ClassVar[str] = "not stated in the repository"
    size: ClassVar[int] = 1267
    protocol: ClassVar[str] = (
        "One edit of each item. The judge gives whole numbers from 1 to 5: consistency with the source, following of the "
        "instruction, quality of the image, and, in ten categories, agreement with an explanation of the right result. The score "
        "of an image is the mean of the scores that its category has."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of the published criteria and scale; the published judge is gpt-4o.",
        "Scores stay on the scale from 1 to 5. The paper reports them from 0 to 100, with a conversion that is not in the "
        "repository.",
        "The frames of temporal prediction are shown as numbered source images; the edited image is not placed among them in order "
        "of time.",
        "As published, knowledge is judged without an explanation if the item has none.",
        "An item with several source images needs a model that takes several.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {"score": Column(1.0, 5.0), **KrisJudge.columns}
    headline_column: ClassVar[str] = "score"
    judged_by = KrisJudge
    layout: ClassVar[str] = (
        "give the folder KRIS_Bench of the repository, which has a folder with annotation.json for each category"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of all categories."""
        lists = sorted(data.glob("*/annotation.json"))
        if not lists:
            raise ValueError(f"{data}: none of its folders contains annotation.json; {self.layout}")
        return JoinedRows(_category(path) for path in lists)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with the name of its folder as the category."""
        category = published(row, "category")
        explain = row.meta.get("explain")
        fields = {"category": category, "explain": explain}
        return SuiteItem(
            id=f"{category}-{published(row, 'key')}",
            prompt=row.instruction,
            category=category,
            cluster=f"{category}/{row.source}",
            fields=fields,
        )

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        """Return the scores of the judge, and as ``score`` the mean of the scores that the category has."""
        names = (*_NAMES, "knowledge") if item.category in _KNOWLEDGE else _NAMES
        scores = {name: given[name] if name in names else NAN for name in KrisJudge.columns}
        return {"score": sum(scores[name] for name in names) / len(names), **scores}


def _category(path: Path) -> Rows:
    """Read the rows of a category. The published code reads ``instruction`` and ``explain``; the files have ``ins_en`` and
    ``explain_en``."""
    table: list[dict[str, Any]] = []
    for row in keyed_rows(path):
        kept = {
            "key": row.get("key"),
            "ori_img": row.get("ori_img"),
            "gt_img": row.get("gt_img") or None,
            "instruction": row.get("ins_en") or row.get("instruction"),
            "explain": row.get("explain_en") or row.get("explain") or None,
            "category": path.parent.name,
        }
        table.append(kept)
    columns = {"instruction": "instruction", "image": "ori_img", "target": "gt_img"}
    return file_rows(table, name=str(path), columns=columns, images=path.parent)
