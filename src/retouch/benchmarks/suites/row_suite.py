"""Suites whose items are the rows of published files: they are read, checked and decoded by ``retouch.data``."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from retouch.benchmarks.suite import BrokenItem, Suite, SuiteItem, require_judge
from retouch.data.rows import Layout, Row, Rows
from retouch.data.sources.folder import image_under
from retouch.data.sources.table import ListRows
from retouch.data.tasks import load_task
from retouch.data.validation import find_problems
from retouch.rewards.base import RewardSection
from retouch.rewards.vlm.base import JudgeModel
from retouch.types import Json, Task

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray
    from PIL.Image import Image


class RowSuite(Suite):
    """A suite of rows. Derived classes say how their files are read (``rows``) and what a row is (``item``).

    Images stay encoded, in memory or in their files, until ``task_for`` decodes those of one item.
    """

    layout: ClassVar[str]
    """Where the data are published, and which of its folders or files to give."""
    on_hub: ClassVar[bool] = False
    """Whether ``rows`` also takes an id on the Hugging Face Hub."""

    judged_by: ClassVar[type[RewardSection]]
    """The reward that scores images with the judge that the user named; without one, a suite overrides ``reward``."""

    _rows: Rows | None = PrivateAttr(default=None)
    _places: dict[str, int] = PrivateAttr(default_factory=dict)

    @abstractmethod
    def rows(self, data: Path) -> Rows:
        """The rows of the data. Raises ValueError if they are not there, or not of the published layout."""

    @abstractmethod
    def item(self, row: Row) -> SuiteItem | None:
        """The item of a row; None if the options leave it out. Raises ValueError if a published column is missing or wrong."""

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return self.judged_by(judge=require_judge(self, judge))

    def items(self, data: Path | None) -> tuple[list[SuiteItem], list[BrokenItem]]:
        """The items in the order of the rows, each with all its images decoded once, and the rows that cannot be used.

        A second row with the same id is broken. Raises ValueError as ``rows`` does, and if nothing is left.
        """
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
        """The item with its images; of a later turn, with ``previous`` as the source image."""
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


def published(row: Row, key: str) -> str:
    """The text in a published column. Raises ValueError if there is none."""
    value = row.meta.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r}: no text")
    return value


def number_of(row: Row, key: str) -> int:
    """The whole number in a published column, which CSV files give as text. Raises ValueError if there is none."""
    value = row.meta.get(key)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key!r}: no whole number")
    return value


def texts_of(value: Json, key: str) -> list[str]:
    """A published list of texts. Raises ValueError if it is none, or empty."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one.strip() for one in value):
        raise ValueError(f"{key!r}: should be a list of texts")
    return [str(one) for one in value]


def read_json(path: Path) -> Json:
    """The content of a JSON file. Raises ValueError if it is missing or no JSON."""
    try:
        value: Json = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    return value


def keyed_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file: a list of objects, or an object of objects, whose keys become ``key``.

    Raises ValueError for another content. An entry that is no object becomes a row without columns, which is reported as broken.
    """
    value = read_json(path)
    if isinstance(value, Mapping):
        return [{"key": key, **(row if isinstance(row, Mapping) else {})} for key, row in value.items()]
    if isinstance(value, list):
        return [dict(row) if isinstance(row, Mapping) else {} for row in value]
    raise ValueError(f"{path}: should hold an object or a list of rows")


def file_rows(table: Sequence[Mapping[str, Any]], *, name: str, columns: Mapping[str, str], images: Path) -> Rows:
    """Rows that name image files under the folder ``images``. ``columns``: field to published column. ``name``: of the list, for
    messages and ids."""
    path = Path(name)
    return ListRows(table, Layout(name, f"{path.parent.name}/{path.stem}", columns, (), partial(image_under, images)), problems=())


class JoinedRows:
    """The rows of several data sets, one after the other."""

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
    """The share of all answers that are right, for each row of weights: the mean of the values that are not NaN, each weighted by
    the number of its answers. NaN where nothing is counted."""
    import numpy as np

    known = ~np.isnan(values) & (counts > 0)
    total = weights[:, known] @ counts[known]
    share: Float[ndarray, " b"] = np.where(
        total > 0, weights[:, known] @ (values * counts)[known] / np.where(total > 0, total, 1), np.nan
    )
    return share
