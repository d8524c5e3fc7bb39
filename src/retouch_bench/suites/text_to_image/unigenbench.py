"""UniGenBench (arXiv 2508.20751) and UniGenBench++ (arXiv 2510.18701): prompts with test points of ten dimensions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_prompts
from retouch.types import Column, Json, Sample, Scores
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite, number_of, pooled_mean, published, texts_of
from retouch_judge.base import NAN, JudgeReward, Prompt, image_parts, quoted, rubric
from retouch_judge.questions import ScoresForm
from retouch_judge.wording import Scale

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray

DIMENSIONS = {
    "Style": "style",
    "World Knowledge": "world_knowledge",
    "Attribute": "attribute",
    "Action": "action",
    "Relationship": "relationship",
    "Compound": "compound",
    "Grammar": "grammar",
    "Entity Layout": "layout",
    "Logical Reasoning": "reasoning",
    "Text Generation": "text",
}
_YES_OR_NO = Scale(0, 1, whole=True)


def dimension(point: str) -> str:
    """Return the column of a test point such as "Attribute - Quantity". Raises ValueError for an unknown dimension."""
    kind = point.partition("-")[0].strip()
    if kind not in DIMENSIONS:
        raise ValueError(f"'Testpoints': {point!r} has an unknown dimension; the dimensions are {', '.join(DIMENSIONS)}")
    return DIMENSIONS[kind]


class UniGenJudge(JudgeReward):
    """The judge of UniGenBench: one question for all test points of ``task.meta["points"]``.

    Columns, 0 to 1: ``overall``, the share of points that the image satisfies, and the same for the points of each dimension, NaN
    if the dimension has no point.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "overall": Column(0.0, 1.0),
        **{name: Column(0.0, 1.0, diagnostic=True) for name in DIMENSIONS.values()},
    }
    rubrics: ClassVar[tuple[str, ...]] = ("test-points",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("test-points", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for a task without points."""
        import torch

        points = [_points(sample.task.id, sample.task.meta) for sample in samples]
        verdicts = self.panel.judge([_prompt(sample, each) for sample, each in zip(samples, points, strict=True)])
        table = {name: torch.full((len(samples),), NAN) for name in self.columns}
        for row, (verdict, each) in enumerate(zip(verdicts, points, strict=True)):
            answers = [float(verdict.mean(f"point_{number}")) for number in range(1, len(each) + 1)]
            table["overall"][row] = sum(answers) / len(answers)
            for name in {dimension(point["kind"]) for point in each}:
                own = [answer for answer, point in zip(answers, each, strict=True) if dimension(point["kind"]) == name]
                table[name][row] = sum(own) / len(own)
        return table


def _points(name: str, meta: Mapping[str, Any]) -> list[dict[str, str]]:
    listed = meta.get("points")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'task {name!r} has no test points: give meta["points"]')
    return [dict(one) for one in listed]


def _prompt(sample: Sample, points: Sequence[Mapping[str, str]]) -> Prompt:
    listed: dict[str, Json] = {str(number): f"{point['kind']}: {point['words']}" for number, point in enumerate(points, 1)}
    parts = image_parts(sample, quoted("Prompt", sample.task.instruction), quoted("Points", listed))
    return Prompt(rubric("test-points"), parts, ScoresForm({f"point_{number}": _YES_OR_NO for number in listed}))


class UniGenSuite(RowSuite):
    """UniGenBench: 600 English prompts, short or long."""

    name: ClassVar[str] = "unigenbench"
    title: ClassVar[str] = "UniGenBench"
    source: ClassVar[str] = "https://github.com/CodeGoat24/UniGenBench"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[int] = 600
    protocol: ClassVar[str] = (
        "Four images of each prompt. The judge decides for each test point whether the image satisfies it. The score of each of "
        "the ten dimensions is the share of its satisfied points over all images; the headline is the mean of the dimensions."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompt is our wording; the published judges are gemini-2.5-pro and UniGenBench-EvalModel-qwen-72b-v1, which "
        "was tuned on the published wording.",
        "The published script prints the dimensions and no overall number.",
        "The Chinese files, whose test points have Chinese names, are not read.",
    )
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = UniGenJudge.columns
    headline_column: ClassVar[str] = "overall"
    judged_by = UniGenJudge
    layout: ClassVar[str] = "give data/test_prompts_en.csv or test_prompts_en_long.csv of the repository CodeGoat24/UniGenBench"

    def rows(self, data: Path) -> Rows:
        """Read the lines of the file."""
        return read_prompts(data, columns={"instruction": "prompt_en"}, name="unigenbench")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item with its test points. Raises ValueError if they do not have the published format."""
        try:
            listed = json.loads(published(row, "sub_dims_en"))
        except json.JSONDecodeError as error:
            raise ValueError(f"'sub_dims_en': not JSON: {error}") from None
        if not isinstance(listed, dict):
            raise ValueError(f"'sub_dims_en': not an object: {listed!r:.60}")
        kinds, words = (texts_of(listed.get(key), key) for key in ("Testpoints", "Testpoint Description"))
        if len(kinds) != len(words):
            raise ValueError(f"{len(kinds)} test points with {len(words)} descriptions")
        for kind in kinds:
            dimension(kind)
        points: list[Json] = [{"kind": kind, "words": text} for kind, text in zip(kinds, words, strict=True)]
        return SuiteItem(id=str(number_of(row, "index")), prompt=row.instruction, fields={"points": points})

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        """Compute the pooled share of each dimension, and their mean as ``overall``. The columns of another reward are averaged."""
        import numpy as np

        if not values.keys() >= set(DIMENSIONS.values()):
            return super().headline(items, values, weights)
        kinds = [[dimension(str(point["kind"])) for point in _points(item.id, item.fields)] for item in items]
        found: dict[str, Float[ndarray, " b"]] = {}
        for name in DIMENSIONS.values():
            counts = np.array([float(each.count(name)) for each in kinds])
            found[name] = pooled_mean(values[name], counts, weights)
        shares = np.stack(list(found.values()))
        known = ~np.isnan(shares)
        overall = np.where(known.any(0), np.nansum(shares, 0) / np.maximum(known.sum(0), 1), np.nan)
        return {"overall": overall, **found}
