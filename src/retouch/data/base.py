"""The base classes of data sources.

A data source is the ``data`` section of a recipe and builds the tasks of a run. To write your own, derive from ``StoredData`` or
``ImageData`` and implement ``rows`` (reading, checking, splitting and resizing are then done for you), or derive from
``DataSource`` and implement ``build``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from retouch.config.section import Count, NonNegative, Pixels, Section, Share
from retouch.data.guard import refuse_test_sets
from retouch.data.images import Exact, Resize
from retouch.data.requirements import CheckedShare, RowRequirements
from retouch.data.rows import Problem, Rows
from retouch.data.sampler import Drawable, Subset
from retouch.data.split import limit, split_by_source
from retouch.data.tasks import DrawnTasks, Tasks
from retouch.data.validation import OnBadRow, accept, accept_rows
from retouch.types import Json, SplitName, Task, TaskContents


def _equal_weights(value: Any) -> Any:
    """A list of numbers is short for equal weights."""
    if isinstance(value, list | tuple) and all(isinstance(entry, int) for entry in value) and len(set(value)) == len(value):
        return {str(entry): 1.0 for entry in value}
    return value


def _one_positive(mixture: dict[int, float]) -> dict[int, float]:
    if not any(mixture.values()):
        raise ValueError("every weight is 0; give one number a weight above 0")
    return mixture


Complexity: TypeAlias = Annotated[int, Field(strict=False, ge=1, le=4)]
Mixture: TypeAlias = Annotated[
    dict[Complexity, NonNegative], Field(min_length=1), BeforeValidator(_equal_weights), AfterValidator(_one_positive)
]
HeldOut: TypeAlias = Share | Count | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class DataContext:
    """What a data source must know of the run to build its tasks.

    ``seed``: of the run. ``size``: (height, width) in px that the model works at; None keeps every image's size. ``eval_split``,
    ``eval_tasks`` (most held-out tasks) and ``eval_seed``: the recipe's ``eval`` section. ``eval_source``: the run's data source as
    evaluation uses it (``DataSource.for_evaluation``). ``required``: what every row must have. ``trains``: False if the policy is
    only evaluated or used, so that known test sets are allowed and no training task is needed.
    """

    seed: int = 0
    size: tuple[int, int] | None = None
    eval_split: SplitName = "test"
    eval_tasks: int = 64
    eval_seed: int = 0
    eval_source: DataSource | None = None
    required: RowRequirements = field(default_factory=RowRequirements)
    trains: bool = True


@dataclass(frozen=True)
class DataSets:
    """The tasks of a run. ``train`` (a sequence, or a stream) and ``heldout`` have no source image in common.

    ``test_sets``: known test sets among the data, where the recipe allows training on them. ``problems``: found while reading, also
    in rows that were left out.
    """

    train: Drawable
    heldout: Sequence[Task]
    test_sets: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def with_model(self, model: object) -> DataSets:
        """The same tasks, completed with what only the loaded image model can compute. Raises ValueError if it cannot."""
        return self


class DataSource(Section):
    """Where the tasks of a run come from."""

    path_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that hold paths or Hub ids, those of the training data first. A run can be resumed with other values of them."""
    on_hub: ClassVar[bool] = False
    """Whether a path that is not on this machine is an id on the Hugging Face Hub."""

    allow_test_sets: bool = False
    """Train even on data known to be a test set; the run records it."""

    @abstractmethod
    def build(self, context: DataContext) -> DataSets:
        """The tasks to train on and the held-out tasks.

        Raises ValueError if rows are unusable, where no task is left, and where a known test set would be trained on.
        """

    def objects(self) -> Mapping[str, Any]:
        """Objects of this process that the section stands for, by their names (see ``retouch.config.live``)."""
        return {}

    def contents(self) -> TaskContents:
        """What the tasks have, as far as it is known before reading them."""
        return TaskContents()

    def for_evaluation(self, *, tasks: int, seed: int, split: SplitName, complexity: Mapping[int, float] | None) -> DataSource:
        """The source that held-out tasks come from. Only generated data differ: they draw ``tasks`` tasks of ``split`` by
        ``seed``."""
        return self

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        """What is wrong with this section, one line each, as ``key: reason; what to do``.

        ``at``: the section's place in the recipe ("data"). ``eval_split``: the recipe's ``eval.split`` if the run is evaluated on
        the held-out tasks of this source, else None.
        """
        yield from ()

    def all_tasks(self, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Sequence[Task]:
        """All tasks with images resized to ``size``, (height, width) in px; none is held out. Used by ``retouch data tokenize``.

        Raises ValueError if they cannot be tokenized.
        """
        raise ValueError(f"data.kind: {self.label} data cannot be tokenized; give data with source images")

    def keys_for_all(self, path: str) -> dict[str, Json]:
        """The keys with which this section reads ``path`` and holds all of its rows out, for evaluation.

        Raises ValueError if it reads no files.
        """
        raise ValueError(f"data.kind: {self.label} reads no files; use a recipe whose data have the layout of {path}")

    @classmethod
    def rows_at(cls, path: Path) -> Rows | None:
        """The rows of an existing file or folder in this source's layout, else None."""
        return None

    @property
    def label(self) -> str:
        """The kind, or the class of an imported source: its name in messages."""
        return str(getattr(self, "kind", type(self).__name__))

    @property
    def image_size(self) -> Pixels | None:
        """(height, width) in px that this section resizes images to; None leaves it to the model."""
        return None

    def paths(self, *keys: str) -> list[str]:
        """The values of these keys, by default of all ``path_keys``."""
        values = [getattr(self, key) for key in keys or self.path_keys]
        return [path for value in values for path in ((value,) if isinstance(value, str) else value)]

    def refuse_test_sets(self, *, trains: bool = True) -> tuple[str, ...]:
        """The known test sets among the training data, one line each, judged by path and by ``split`` where there is such a key.

        Raises ValueError if there are any and ``allow_test_sets`` is not set. Without training (``trains`` False) there are none.
        """
        if not trains:
            return ()
        split = getattr(self, "split", None)
        found = refuse_test_sets(self.paths(*self.path_keys[:1]), split=split, allow_test_sets=self.allow_test_sets)
        return tuple(map(str, found))


class StoredData(DataSource):
    """Data that are read row by row and split by their source images."""

    path_keys: ClassVar[tuple[str, ...]] = ("path",)

    held_out: HeldOut = 0.1
    """Kept for evaluation: a share of the source images (of the prompts, where there are no images), or (a whole number) at least
    so many rows. All rows of an image stay together. "all" keeps every row: for `retouch eval`, not for training."""
    tags: tuple[str, ...] = Field(default=(), exclude_if=lambda tags: not tags)
    """Columns whose values become tags of the tasks (``["task_type"]``): evaluations have a row for each value, and
    ``eval.headline`` can name them."""
    limit: Count | None = None
    """Use so many training rows, drawn by the recipe's seed; null uses all."""

    @abstractmethod
    def rows(self, *, seed: int) -> Rows:
        """The rows of the data set; nothing is decoded yet. ``seed``: of the run. Raises ValueError if there are none."""

    @property
    def bad_rows(self) -> OnBadRow:
        """What to do about an unusable row."""
        return "refuse"

    def keys_for_all(self, path: str) -> dict[str, Json]:
        return {self.path_keys[0]: path, "held_out": "all", "limit": None}

    @property
    def checked_share(self) -> CheckedShare:
        """The rows whose images are decoded before training."""
        return "all"

    def build(self, context: DataContext) -> DataSets:
        allowed = self.refuse_test_sets(trains=context.trains)
        require_training_rows(self.held_out, context)
        rows = self.rows(seed=context.seed)
        found = accept_rows(rows, on_bad_row=self.bad_rows, required=context.required, check=self.checked_share, seed=context.seed)
        good = found.indices
        split = split_by_source(found.sources, held_out=self.held_out, seed=context.seed)
        train, heldout = ([good[k] for k in side] for side in (split.train, split.held_out))
        if self.limit is not None:
            train = list(limit(train, n=self.limit, seed=context.seed))
        if context.eval_split == "train":
            heldout = train
        tasks = Tasks(rows, resize=resize_to(self.image_size or context.size))
        training, evaluation = Subset(tasks, train), Subset(tasks, at_most(heldout, context))
        return DataSets(self.as_drawn(training), self.as_drawn(evaluation), allowed, found.problems)

    def as_drawn(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks; if not all rows were checked, unusable ones are refused or skipped when they are drawn."""
        return tasks if self.checked_share == "all" else DrawnTasks(tasks, on_bad_row=self.bad_rows)

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        yield from held_out_problems(self.held_out, at, eval_split)


class ImageData(StoredData):
    """Data with images in files."""

    size: Pixels | None = None
    """Height and width in pixels that every image is resized to; null takes the model's."""
    on_bad_row: OnBadRow = "refuse"
    """What to do about an unusable row: stop before training, or leave it out with a warning."""
    thought_keys: tuple[str, ...] = Field(default=(), exclude_if=lambda keys: not keys)
    """Of a column ``thought`` whose values are maps: the keys that make the chain of thought, in this order, as lines
    "key: value"; empty takes all values without their keys."""
    check: Literal["all", "first"] | Count = Field(default="all", exclude_if=lambda check: check == "all")
    """Rows whose images are decoded before training: all, the first 64, or so many drawn by the recipe's seed. The result is kept,
    and the next start decodes only new and changed files. With fewer rows than all, an unusable row may be found when it is drawn:
    the run then stops, or takes the next row if ``on_bad_row`` is "skip"."""

    @property
    def image_size(self) -> Pixels | None:
        return self.size

    @property
    def bad_rows(self) -> OnBadRow:
        return self.on_bad_row

    @property
    def checked_share(self) -> CheckedShare:
        return self.check

    def all_tasks(self, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Sequence[Task]:
        return usable_tasks(self.rows(seed=0), size=size, on_bad_row=on_bad_row)


def usable_tasks(rows: Rows, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Subset:
    """The tasks of all usable rows, with images resized to ``size``, (height, width) in px. Raises ValueError as ``accept``
    does."""
    good, _ = accept(rows, on_bad_row=on_bad_row)
    return Subset(Tasks(rows, resize=resize_to(size)), good)


def at_most(heldout: Sequence[int], context: DataContext) -> Sequence[int]:
    """``context.eval_tasks`` of the held-out rows, drawn by the evaluation's seed; all rows if there are no more."""
    if len(heldout) <= context.eval_tasks:
        return heldout
    return limit(heldout, n=context.eval_tasks, seed=context.eval_seed)


def held_out_problems(held_out: float | str, at: str, eval_split: SplitName | None) -> Iterator[str]:
    """The problems of rows that are held out and never used, and of an evaluation without tasks."""
    if eval_split == "train" and held_out:
        yield f"eval.split: train evaluates on training tasks, so none need be held out; use {at}.held_out 0, or another split"
    elif eval_split not in (None, "train") and not held_out:
        yield f"{at}.held_out: 0 leaves no tasks for evaluation; give 0.1, or eval.split train if there are too few rows"


def require_training_rows(held_out: float | str, context: DataContext) -> None:
    """Raise ValueError if all rows are held out from a run that trains."""
    if held_out == "all" and context.trains:
        raise ValueError(
            'data.held_out: "all" leaves nothing to train on; it is for `retouch eval`. For training use 0.1, or a number of rows'
        )


def resize_to(size: tuple[int, int] | None) -> Resize | None:
    """What resizes images to ``size``, (height, width) in px; None keeps their sizes."""
    return None if size is None else Exact(width=size[1], height=size[0])
