"""DPG-Bench (ELLA, arXiv 2403.05135): long prompts, with a question for every proposition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from retouch.data.rows import InvalidRow, Layout, Problem, Row, Rows
from retouch.data.sources.folder import read_metadata
from retouch.data.sources.hub import encoded_image
from retouch.types import Column, Json, Sample, Scores, Task
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite, pooled_mean
from retouch_judge.base import NAN, JudgeReward, Prompt, image_parts, quoted, rubric
from retouch_judge.questions import ChoiceForm

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

CATEGORIES = ("global", "entity", "attribute", "relation", "other")
_FORM = ChoiceForm("yes", {"no": 0.0, "yes": 1.0})


class DpgJudge(JudgeReward):
    """The judge of DPG-Bench: asks ``task.meta["questions"]``, objects with ``id``, ``text``, ``parents`` and ``category``.

    Columns, 0 to 1: ``score``, the share of questions that are answered with yes, where a question counts as no if one of its
    parents counts as no; for each category of ``CATEGORIES`` the share without regard to parents, NaN if it has no question. A
    column is NaN if an answer that it needs is missing.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "score": Column(0.0, 1.0),
        **{name: Column(0.0, 1.0, diagnostic=True) for name in CATEGORIES},
    }
    rubrics: ClassVar[tuple[str, ...]] = ("question",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("question", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for a task without questions."""
        import torch

        asked = [questions_of(sample.task) for sample in samples]
        prompts = [
            Prompt(rubric("question"), image_parts(sample, quoted("Question", one["text"])), _FORM)
            for sample, each in zip(samples, asked, strict=True)
            for one in each
        ]
        verdicts = iter(self.panel.judge(prompts))
        rows = [_columns(each, [float(next(verdicts).mean("yes")) for _ in each]) for each in asked]
        return {name: torch.tensor([row[name] for row in rows]) for name in self.columns}


def questions_of(task: Task) -> list[dict[str, Any]]:
    """Return the questions of the task. Raises ValueError if there are none."""
    listed = task.meta.get("questions")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'task {task.id!r} has no questions: give meta["questions"]')
    return [dict(one) for one in listed if isinstance(one, Mapping)]


def _columns(questions: Sequence[Mapping[str, Any]], answers: Sequence[float]) -> dict[str, float]:
    """Compute the columns of one image from the answers."""
    counted: dict[int, float] = {one["id"]: answer for one, answer in zip(questions, answers, strict=True)}
    for one in questions:  # in the published order, so that a question also counts as no if its parent has just become no
        if any(counted.get(parent) == 0 for parent in one["parents"]):
            counted[one["id"]] = 0.0
    columns = {"score": sum(counted.values()) / len(counted)}
    for name in CATEGORIES:
        own = [answer for one, answer in zip(questions, answers, strict=True) if one["category"] == name]
        columns[name] = sum(own) / len(own) if own else NAN
    return columns


class DpgSuite(RowSuite):
    """DPG-Bench: 1065 dense prompts."""

    name: ClassVar[str] = "dpg"
    title: ClassVar[str] = "DPG-Bench"
    source: ClassVar[str] = "https://github.com/TencentQQGYLab/ELLA"
    licence: ClassVar[str] = "Apache-2.0"
    size: ClassVar[int] = 1065
    protocol: ClassVar[str] = (
        "Four images of each prompt. A model answers every question of the prompt with yes or no; a question counts as no if a "
        "question that it depends on counts as no. The score of an image is its share of yes, and the headline is the mean over "
        "images. Categories are shares of all questions of a category, without regard to dependence."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "A vision-language model answers, with our wording around the published question; the published one is mPLUG-large.",
        "Shares are reported from 0 to 1; the published ones are percentages.",
        "The published script skips the first question of the file; here it counts.",
        "Categories count all images of a prompt; the published script counts only the last one.",
        "A missing answer makes the image's score missing; the published script counts every answer other than yes as no.",
    )
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = DpgJudge.columns
    headline_column: ClassVar[str] = "score"
    judged_by = DpgJudge
    layout: ClassVar[str] = "give dpg_bench/dpg_bench.csv of the repository TencentQQGYLab/ELLA"

    def rows(self, data: Path) -> Rows:
        """Read the file: a row for each prompt, with the questions of all its lines."""
        return _PromptRows(data / "dpg_bench.csv" if data.is_dir() else data)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item with its questions."""
        return SuiteItem(id=row.id, prompt=row.instruction, fields={"questions": row.meta["questions"]})

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        """Compute the mean score, and the pooled share of each category."""
        import numpy as np

        found = super().headline(items, values, weights)
        for name in set(CATEGORIES) & set(values):
            counts = np.array([float(sum(one["category"] == name for one in _listed(item))) for item in items])
            found[name] = pooled_mean(values[name], counts, weights)
        return found


def _listed(item: SuiteItem) -> list[dict[str, Any]]:
    questions = item.fields["questions"]
    assert isinstance(questions, list)
    return [one for one in questions if isinstance(one, dict)]


class _PromptRows:
    """The lines of the file, grouped by prompt. If one line of a prompt cannot be used, the whole prompt is broken."""

    def __init__(self, path: Path) -> None:
        table = read_metadata(path)
        self.problems = table.notes
        lines: dict[str, list[tuple[int, Mapping[str, Json] | None, str]]] = defaultdict(list)
        for entry in table.entries:
            fields = entry.fields or {}
            lines[str(fields.get("item_id") or f"line {entry.line}")].append((entry.line, entry.fields, entry.what))
        self._lines = list(lines.values())
        self._layout = Layout(table.file, "dpg", {"id": "item_id", "instruction": "text"}, (), encoded_image)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        lines = self._lines[index]
        questions, wrong = [], []
        for line, fields, what in lines:
            try:
                if fields is None:
                    raise ValueError(what)
                questions.append(_question(fields))
            except ValueError as error:
                wrong.append(Problem(self._layout.file, line, str(error)))
        known = {one["id"] for one in questions}
        strange = sorted({parent for one in questions for parent in one["parents"]} - known)
        if strange and not wrong:
            wrong.append(Problem(self._layout.file, lines[0][0], f"'dependency': this prompt has no question {strange[0]}"))
        if wrong:
            raise InvalidRow(wrong)
        first, fields, _ = lines[0]
        return self._layout.parse({**(fields or {}), "questions": questions}, line=first)


def _question(fields: Mapping[str, Json]) -> dict[str, Any]:
    """Parse the question of a line. Raises ValueError with the column that is missing or wrong."""
    texts = {name: str(fields.get(name) or "").strip() for name in ("proposition_id", "dependency", "question_natural_language")}
    texts["tuple"] = str(fields.get("tuple") or "").strip()
    for name, text in texts.items():
        if not text:
            raise ValueError(f"{name!r}: empty")
    try:
        number, parents = int(texts["proposition_id"]), [int(part) for part in texts["dependency"].split(",")]
    except ValueError:
        raise ValueError("'proposition_id', 'dependency': should be whole numbers") from None
    category = texts["tuple"].partition("(")[0].partition("-")[0].strip().lower()
    return {
        "id": number,
        "text": texts["question_natural_language"],
        "parents": [parent for parent in parents if parent],
        "category": category if category in CATEGORIES else "other",
    }
