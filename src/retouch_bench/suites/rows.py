"""What several suites share: rows of published files, which ``retouch.data`` reads, checks and decodes, and judges with rubrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from retouch.data.checks import find_problems
from retouch.data.rows import Layout, ParsedRows, Row, Rows
from retouch.data.sources.folder import image_under
from retouch.data.tasks import load_task
from retouch.records.files import read_json
from retouch.rewards.base import RewardSection
from retouch.types import Column, Json, Sample, Scores, Task
from retouch_bench.suite import BrokenItem, Suite, SuiteItem, require_judge
from retouch_judge.base import NAN, JudgeReward, Prompt
from retouch_judge.models import JudgeModel

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray
    from PIL.Image import Image


class RowSuite(Suite):
    """A suite of rows. Derived classes define how the files are read (``rows``) and how a row becomes an item (``item``).

    Images stay encoded, in memory or in their files, until ``task_for`` decodes the images of one item.
    """

    layout: ClassVar[str]
    """Where the data are published, and which folder or file of them the user must give."""
    on_hub: ClassVar[bool] = False
    """Whether ``rows`` also accepts an id on the Hugging Face Hub."""

    judged_by: ClassVar[type[RewardSection]]
    """The reward that scores images with the judge that the user named. A suite without a judge overrides ``reward`` instead."""

    _rows: Rows | None = PrivateAttr(default=None)
    _places: dict[str, int] = PrivateAttr(default_factory=dict)

    @abstractmethod
    def rows(self, data: Path) -> Rows:
        """Read the rows of the data. Raises ValueError if they are missing or do not have the published layout."""

    @abstractmethod
    def item(self, row: Row) -> SuiteItem | None:
        """Make the item of a row; None if the options exclude it. Raises ValueError if a published column is missing or wrong."""

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return self.judged_by(judge=require_judge(self, judge))

    def items(self, data: Path | None) -> tuple[list[SuiteItem], list[BrokenItem]]:
        """Return the items in the order of the rows, and the rows that cannot be used. All images are decoded once, as a check. A
        second row with the same id cannot be used. Raises ValueError as ``rows`` does, and if there are no items."""
        if data is None:
            raise ValueError(f"{self.name} needs its data, which are not part of this package: {self.layout}")
        if not data.exists() and not self.on_hub:
            raise ValueError(f"{data}: no such file or folder; {self.layout}")
        rows = self.rows(data)
        items: list[SuiteItem] = []
        broken: list[BrokenItem] = []
        places: dict[str, int] = {}
        for index, problems in find_problems(rows):
            wrong = [problem for problem in problems if problem.severity == "error"]
            if wrong:
                place = f"{Path(wrong[0].file).name}:{wrong[0].line}"
                broken.append(BrokenItem(place, "; ".join(problem.what for problem in wrong)))
                continue
            row = rows[index]
            place = f"{Path(row.file).name}:{row.line}"
            try:
                item = self.item(row)
            except ValueError as error:
                broken.append(BrokenItem(place, str(error)))
                continue
            if item is not None and item.id in places:
                broken.append(BrokenItem(place, f"a second row with the id {item.id!r}"))
            elif item is not None:
                places[item.id] = index
                items.append(item)
        if not items:
            first = f"; the first of {len(broken)} that cannot be used: {broken[0].reason}" if broken else ""
            raise ValueError(f"{data}: no items for {self.name} with these options{first}. {self.layout}")
        self._rows, self._places = rows, places
        return items, broken

    def task_for(self, item: SuiteItem, *, turn: int = 0, previous: Image | None = None) -> Task:
        """Return the task of the item with its images; for a later turn, ``previous`` is the source image."""
        assert self._rows is not None, "items() comes before task_for()"
        task = load_task(self._rows[self._places[item.id]], resize=None)
        if turn == 0:
            images = task.images
        else:
            assert previous is not None, "a later turn edits the image of the turn before"
            images = (previous,)
        return replace(
            task,
            id=item.id if turn == 0 else f"{item.id} turn {turn + 1}",
            instruction=item.instruction(turn),
            images=images,
            text=item.text,
            tags={"category": item.category} if item.category else {},
            meta=item.fields,
        )


class OwnSuite(RowSuite):
    """Data of the user, scored by a reward that ``--judge`` names. Its columns are those of the reward."""

    source: ClassVar[str] = "rows of your own"
    licence: ClassVar[str] = "your licence"
    size: ClassVar[int] = 0
    protocol: ClassVar[str] = "One image of each row; the means of the reward's columns."
    columns: ClassVar[Mapping[str, Column]] = {}
    headline_column: ClassVar[str] = "the reward's first column"

    def item(self, row: Row) -> SuiteItem | None:
        if self.task == "editing" and not row.images:
            raise ValueError("no source image")
        category = row.meta.get("category", row.meta.get("Category"))
        return SuiteItem(
            id=row.id.replace("/", "-"),
            prompt=row.instruction,
            category=category if isinstance(category, str) else "",
            cluster=row.source if row.images else "",
            text=row.text,
            fields=row.meta,
        )

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        example = '{"kind": "viescore", "judge": {...}}' if self.task == "editing" else "pickscore:FOLDER"
        raise ValueError(
            f"{self.name} is scored by a reward that you choose: name it with --judge, as in `retouch score`, for example "
            f"--judge '{example}' or --judge my_rewards:redness (in Python: judge=, also a function)"
        )


def published(row: Row, key: str) -> str:
    """Return the text in a published column. Raises ValueError if there is none."""
    value = row.meta.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r}: no text")
    return value


def number_of(row: Row, key: str) -> int:
    """Return the integer in a published column, also if it is text, as in CSV files. Raises ValueError if there is none."""
    value = row.meta.get(key)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key!r}: no whole number")
    return value


def texts_of(value: Json, key: str) -> list[str]:
    """Return a published list of texts. Raises ValueError if the value is not a list of texts, or is empty."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one.strip() for one in value):
        raise ValueError(f"{key!r}: should be a list of texts")
    return [str(one) for one in value]


def keyed_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON file: a list of objects, or an object of objects, whose keys become the column ``key``.

    Raises ValueError if the file is missing or has other content. An entry that is not an object becomes a row without columns,
    which is reported as broken.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    value = read_json(path)
    if isinstance(value, Mapping):
        return [{"key": key, **(row if isinstance(row, Mapping) else {})} for key, row in value.items()]
    if isinstance(value, list):
        return [dict(row) if isinstance(row, Mapping) else {} for row in value]
    raise ValueError(f"{path}: should contain an object or a list of rows")


def file_rows(table: Sequence[Mapping[str, Any]], *, name: str, columns: Mapping[str, str], images: Path) -> Rows:
    """Make rows that name image files under the folder ``images``. ``columns``: maps fields to published columns. ``name``: path
    of the list, for messages and ids."""
    path = Path(name)
    layout = Layout(name, f"{path.parent.name}/{path.stem}", columns, (), partial(image_under, images))
    return ParsedRows(layout, len(table), lambda at: (at + 1, table[at]), problems=(), identity=None)


class JoinedRows:
    """The concatenated rows of several data sets."""

    def __init__(self, parts: Iterable[Rows]) -> None:
        self._parts = list(parts)
        self.problems = tuple(problem for part in self._parts for problem in part.problems)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, index: int) -> Row:
        for part in self._parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


def pooled_mean(values: Float[ndarray, " n"], counts: Float[ndarray, " n"], weights: Float[ndarray, "b n"]) -> Float[ndarray, " b"]:
    """Return the share of all answers that are right, for each row of ``weights``: the mean of the values that are not NaN,
    weighted with the number of answers, ``counts``. NaN if no answer is counted."""
    import numpy as np

    known = ~np.isnan(values) & (counts > 0)
    total = weights[:, known] @ counts[known]
    share: Float[ndarray, " b"] = np.where(
        total > 0, weights[:, known] @ (values * counts)[known] / np.where(total > 0, total, 1), np.nan
    )
    return share


class RubricReward(JudgeReward):
    """A judge whose answers are its columns: each name in the form of a prompt is a column.

    A column is NaN if no prompt of the sample asks for it, or if the answer is missing. Repeated answers are averaged.
    """

    @abstractmethod
    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        """Yield the prompts about a sample. Raises ValueError if its task lacks data that they need."""

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32."""
        import torch

        prompts = [list(self.prompts(sample)) for sample in samples]
        verdicts = iter(self.panel.judge([prompt for each in prompts for prompt in each]))
        scores = {name: torch.full((len(samples),), NAN) for name in self.columns}
        for row, each in enumerate(prompts):
            for _ in each:
                for name, answers in next(verdicts).scores.items():
                    scores[name][row] = answers.mean()
        return scores
