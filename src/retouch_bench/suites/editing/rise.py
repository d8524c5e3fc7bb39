"""RISEBench (arXiv 2504.02826): edits that need temporal, causal, spatial or logical reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from retouch.data.rows import Row, Rows
from retouch.rewards.base import source_image
from retouch.types import Column, Sample
from retouch_bench.suite import Scored, SuiteItem
from retouch_bench.suites.row_suite import RowSuite, file_rows, keyed_rows, published
from retouch_bench.suites.rubric_reward import RubricReward
from retouch_judge.base import NAN, Prompt, image_parts, judged_image, quoted, rubric
from retouch_judge.questions import Part, ScoresForm
from retouch_judge.wording import Scale

_FIVE, _BINARY = Scale(1, 5, whole=True), Scale(0, 1, whole=True)
_LOGICAL = "logical_reasoning"
_CATEGORIES = ("temporal_reasoning", "causal_reasoning", "spatial_reasoning", _LOGICAL)
_FIELDS = ("category", "subtask", "reference", "reference_txt", "consistency_free", "reasoning_img")


class RiseJudge(RubricReward):
    """The judge of RISEBench. Columns: ``reasoning_score`` and ``consistency``, 1 to 5 (logical puzzles: 0 or 1), and ``quality``,
    1 to 5. Puzzles have no ``quality``, and tasks marked ``consistency_free`` have no ``consistency``."""

    columns: ClassVar[Mapping[str, Column]] = {
        "reasoning_score": Column(0.0, 5.0),
        "consistency": Column(0.0, 5.0, diagnostic=True),
        "quality": Column(1.0, 5.0, diagnostic=True),
    }
    rubrics: ClassVar[tuple[str, ...]] = (
        "five-consistency",
        "five-reasoning",
        "five-quality",
        "logic-consistency",
        "logic-answer",
    )
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("five-consistency", 2), ("five-reasoning", 1), ("five-quality", 1))
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        """Yield one to three questions, depending on the category and ``consistency_free``."""
        meta = sample.task.meta
        logical = meta.get("category") == _LOGICAL
        scale, known = (_BINARY, "logic") if logical else (_FIVE, "five")
        right = sample.task.reference
        instruction = quoted("Instruction", sample.task.instruction)
        description = meta.get("reference_txt") if logical else meta.get("reference")
        facts = (instruction, quoted("The right result", description)) if description else (instruction,)
        if not meta.get("consistency_free"):
            before: tuple[Part, ...] = ("Source picture:", source_image(sample.task) if right is None else right)
            shown = (*(facts if logical else facts[:1]), *before, "Edited picture:", judged_image(sample))
            yield Prompt(rubric(f"{known}-consistency"), shown, ScoresForm({"consistency": scale}))
        needed: tuple[Part, ...] = ()
        if right is not None:
            needed = ("The right result:", right)
        elif meta.get("reasoning_img"):
            needed = ("Source picture:", source_image(sample.task))
        shown = (*facts, *needed, "Edited picture:", judged_image(sample))
        answer = "logic-answer" if logical else "five-reasoning"
        yield Prompt(rubric(answer), shown, ScoresForm({"reasoning_score": scale}))
        if not logical:
            yield Prompt(rubric("five-quality"), image_parts(sample), ScoresForm({"quality": _FIVE}))


class RiseSuite(RowSuite):
    """RISEBench: 360 edits, most of which need reasoning about the correct result."""

    name: ClassVar[str] = "rise"
    title: ClassVar[str] = "RISEBench"
    source: ClassVar[str] = "https://github.com/PhoenixZ810/RISEBench"
    licence: ClassVar[str] = "not stated for the data; the published outputs are MIT"
    size: ClassVar[int] = 360
    protocol: ClassVar[str] = (
        "One edit of each item. The judge gives whole numbers from 1 to 5 for reasoning (R), consistency (C) and plausibility "
        "(V); puzzles get 0 or 1 for R and C, which count as 1 and 5, and no V. The score is 0.5 R + 0.3 C + 0.2 V, without "
        "consistency 0.8 R + 0.2 V, for puzzles 0.7 R + 0.3 C; if R is 1, the score is halved, but at least 1. It is reported as "
        "25 (score - 1). An item is solved if all its scores are 5; the headline is the share of solved items."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of the published criteria and scales; the published judge is gpt-4.1 at temperature "
        "0.",
        "As in the published script, an item without a consistency score cannot be solved.",
        "In the published script, a row without the key consistency_free can count as free of consistency if other rows have "
        "the key; here it does not.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {
        "solved": Column(0.0, 1.0),
        "score": Column(0.0, 100.0),
        "reasoning": Column(1.0, 5.0),
        "consistency": Column(1.0, 5.0, diagnostic=True),
        "quality": Column(1.0, 5.0, diagnostic=True),
    }
    headline_column: ClassVar[str] = "solved"
    judged_by = RiseJudge
    layout: ClassVar[str] = (
        "from the data set PhoenixZ/RISEBench, give a folder that contains datav2_total_w_subtask.json and the unpacked folder data"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of ``datav2_total_w_subtask.json``."""
        name = data / "datav2_total_w_subtask.json"
        images = data / "data" if (data / "data").is_dir() else data
        table = [{**row, "reference_img": row.get("reference_img") or None} for row in keyed_rows(name)]
        columns = {
            "id": "index",
            "instruction": "instruction",
            "image": "image",
            "source": "image",
            "reference": "reference_img",
        }
        return file_rows(table, name=str(name), columns=columns, images=images)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item. Raises ValueError for an unknown category, or without a description or image of the correct result."""
        category = published(row, "category")
        if category not in _CATEGORIES:
            raise ValueError(f"'category': {category!r} is not one of {', '.join(_CATEGORIES)}")
        described = "reference_txt" if category == _LOGICAL else "reference"
        if row.reference is None and not row.meta.get(described):
            raise ValueError(f"{described!r}: no text, and no reference_img; one of them must describe the correct result")
        fields = {key: row.meta[key] for key in _FIELDS if row.meta.get(key) is not None}
        return SuiteItem(id=row.id, prompt=row.instruction, category=category, cluster=row.source, fields=fields)

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        """Compute the score with the published weights, and whether the item is solved."""
        reasoning, consistency, quality = (given[name] for name in ("reasoning_score", "consistency", "quality"))
        best: tuple[float, ...]
        if item.category == _LOGICAL:
            reasoning, consistency, quality = 4 * reasoning + 1, 4 * consistency + 1, NAN
            score, best = 0.3 * consistency + 0.7 * reasoning, (reasoning, consistency)
        elif item.fields.get("consistency_free"):
            score, best = 0.2 * quality + 0.8 * reasoning, (reasoning, quality)
        else:
            score, best = 0.3 * consistency + 0.5 * reasoning + 0.2 * quality, (reasoning, consistency, quality)
        if reasoning == 1:
            score = max(0.5 * score, 1.0)
        solved = (
            NAN if any(each != each for each in best) else float(set(best) == {5.0} and not item.fields.get("consistency_free"))
        )
        return {
            "solved": solved,
            "score": 25 * (score - 1),
            "reasoning": reasoning,
            "consistency": consistency,
            "quality": quality,
        }
