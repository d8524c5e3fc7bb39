"""The base classes of data sources.

A data source is the ``data`` section of a recipe and builds the tasks of a run. To write your own, derive from ``StoredData`` or
``ImageData`` and implement ``rows`` (reading, checking, splitting and resizing are then done for you), or derive from
``DataSource`` and implement ``build``.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from retouch.config.section import Count, NonNegative, Pixels, Section, Share
from retouch.data.checks import AcceptedRows, OnBadRow, accept_rows, combined_content
from retouch.data.guard import refuse_test_sets
from retouch.data.rows import Problem, RowRequirements, Rows
from retouch.data.tasks import Drawable, Subset, Tasks, UncheckedTasks, limit, split_by_source
from retouch.types import Json, SplitName, Task, TaskContents

_log = logging.getLogger(__name__)


def _equal_weights(value: Any) -> Any:
    """Turn a list of different numbers into a map that gives each number the weight 1."""
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


def _one_message(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """One error, instead of one for each type of the union."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("held_out", "Input should be a share below 1, a whole number of rows, or 'all'") from None


HeldOut: TypeAlias = Annotated[Share | Count | Literal["all"], WrapValidator(_one_message)]


@dataclass(frozen=True, kw_only=True)
class DataContext:
    """What a data source must know about the run to build its tasks.

    ``seed``: the seed of the run. ``size``: (height, width) in px at which the model works; None keeps the size of every image.
    ``eval_split``, ``eval_tasks`` (the largest number of held-out tasks) and ``eval_seed``: from the recipe's ``eval`` section.
    ``eval_source``: the source of the held-out tasks (``DataSource.for_evaluation``). ``required``: what every row must have.
    ``trains``: False if the policy is only evaluated or used, so that known test sets are allowed and no training task is needed.
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

    ``test_sets``: known test sets among the data, if the recipe allows training on them. ``problems``: the problems that were found
    while reading, also in rows that were left out. ``content``: what is known about the content of the training rows
    (``checks.combined_content``).
    """

    train: Drawable
    heldout: Sequence[Task]
    test_sets: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    content: Mapping[str, str | int] = field(default_factory=dict, kw_only=True)

    def with_model(self, model: object) -> DataSets:
        """The same tasks, with the fields added that only the loaded image model can compute. Raises ValueError if the model does
        not fit the data."""
        return self


class DataSource(Section):
    """The ``data`` section of a recipe: it builds the tasks of a run."""

    path_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that hold paths or Hub ids; the first key holds those of the training data. A run can be resumed with other values of
    these keys."""
    on_hub: ClassVar[bool] = False
    """Whether a path that does not exist on this machine is an id on the Hugging Face Hub."""
    has_length: ClassVar[bool] = True
    """Whether the number of training tasks is known before the run. A run over a stream cannot be given in passes."""
    image_size: ClassVar[Pixels | None] = None
    """(height, width) in px to which this section resizes images; None uses the size of the model."""
    generated_size: ClassVar[Pixels | None] = None
    """(height, width) in px of the source images that this section generates; None if they are stored, or if it has none."""

    allow_test_sets: bool = False
    """Allow training on data that are a known test set; the run records this."""

    @abstractmethod
    def build(self, context: DataContext) -> DataSets:
        """The training tasks and the held-out tasks.

        Raises ValueError if rows are unusable, if no task is left, and if a known test set would be trained on.
        """

    def objects(self) -> Mapping[str, Any]:
        """The Python objects that the section refers to, by name (see ``retouch.config.section``)."""
        return {}

    def contents(self) -> TaskContents:
        """What the tasks contain, as far as this is known before they are read."""
        return TaskContents()

    def for_evaluation(self, *, tasks: int, seed: int, split: SplitName, complexity: Mapping[int, float] | None) -> DataSource:
        """The source of the held-out tasks. Only generated data differ from the source itself: they return a copy that draws
        ``tasks`` tasks of ``split`` with ``seed`` and, unless it is None, with the weights ``complexity``."""
        return self

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        """The problems of this section, one line each, as ``key: reason; what to do``.

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
        """The recipe keys with which this section reads ``path`` and holds out all of its rows, for evaluation.

        If ``kind`` is one of them, they are all keys of a section of this kind, which replaces this section.

        Raises ValueError if this kind of data cannot read other data.
        """
        raise ValueError(f"data.kind: {self.label} cannot read other data; use a recipe whose data have the layout of {path}")

    @classmethod
    def rows_at(cls, path: Path) -> Rows | None:
        """The rows of an existing file or folder if it has the layout of this source, else None."""
        return None

    @property
    def label(self) -> str:
        """The name of this source in messages: its kind, or the class of an imported source."""
        return str(getattr(self, "kind", type(self).__name__))

    def paths(self, *keys: str) -> list[str]:
        """The paths in the given ``keys``, by default in all ``path_keys``. A key that this class does not have is left out."""
        values = [getattr(self, key) for key in keys or self.path_keys if key in type(self).model_fields]
        return [path for value in values for path in ((value,) if isinstance(value, str) else value)]

    def refuse_test_sets(self, *, trains: bool = True) -> tuple[str, ...]:
        """The known test sets among the training data, one line each, recognised by path and by the key ``split`` if there is one.

        Empty if the run does not train (``trains`` False). Raises ValueError if there are test sets and ``allow_test_sets`` is not
        set.
        """
        if not trains:
            return ()
        split = getattr(self, "split", None)
        found = refuse_test_sets(self.paths(*self.path_keys[:1]), split=split, allow_test_sets=self.allow_test_sets)
        return tuple(map(str, found))


class StoredData(DataSource):
    """Data that are read row by row and are split by source image."""

    path_keys: ClassVar[tuple[str, ...]] = ("path",)

    held_out: HeldOut = 0.1
    """Rows that are held out for evaluation. A number below 1 is a share of the source images, or of the prompts if there are no
    images. A whole number is a number of rows; there may be more, because all rows of an image stay together. "all" holds out every
    row: for `retouch eval`, not for training."""
    tags: tuple[str, ...] = Field(default=(), exclude_if=lambda tags: not tags)
    """Columns whose values become tags of the tasks (``["task_type"]``): evaluations have a row for each value, and
    ``eval.headline`` can name them."""
    limit: Count | None = None
    """Number of training rows to use, drawn with the recipe's seed; null uses all."""

    @abstractmethod
    def rows(self, *, seed: int) -> Rows:
        """The rows of the data set, with no image decoded yet. ``seed``: the seed of the run. Raises ValueError if there are no
        rows."""

    def keys_for_all(self, path: str) -> dict[str, Json]:
        if not self.paths(*self.path_keys[:1]):
            return super().keys_for_all(path)
        # A revision is a commit of one data set, so other data have none.
        pinned: dict[str, Json] = {"revision": None} if "revision" in type(self).model_fields and path not in self.paths() else {}
        return {self.path_keys[0]: path, "held_out": "all", "limit": None, **pinned}

    def build(self, context: DataContext) -> DataSets:
        allowed = self.refuse_test_sets(trains=context.trains)
        require_training_rows(self.held_out, context)
        tasks, found = self.checked_tasks(self.rows(seed=context.seed), context)
        good = found.indices
        split = split_by_source(found.sources, held_out=self.held_out, seed=context.seed)
        train, heldout = ([good[k] for k in side] for side in (split.train, split.held_out))
        if self.limit is not None:
            train = list(limit(train, n=self.limit, seed=context.seed))
        if context.eval_split == "train":
            heldout = train
        chosen = at_most(heldout, context, held_out=self.held_out)
        training, evaluation = self.training_tasks(tasks, train, seed=context.seed), Subset(tasks, chosen)
        content = combined_content([found.contents[row] for row in train])
        return DataSets(self.as_drawn(training), self.as_drawn(evaluation), allowed, found.problems, content=content)

    def checked_tasks(self, rows: Rows, context: DataContext) -> tuple[Tasks, AcceptedRows]:
        """The tasks of all rows, and the rows that can be used."""
        tasks = Tasks(rows, resize=resize_to(self.image_size or context.size))
        found = accept_rows(
            rows,
            on_bad_row=getattr(self, "on_bad_row", "refuse"),
            required=context.required,
            check=getattr(self, "check", "all"),
            seed=context.seed,
            resize=tasks.resize,
        )
        return tasks, found

    def training_tasks(self, tasks: Tasks, train: Sequence[int], *, seed: int) -> Sequence[Task]:
        """The training tasks, made from the tasks at the indices ``train``. ``seed``: the seed of the run."""
        return Subset(tasks, train)

    def as_drawn(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks; if not all rows were checked, an unusable task is refused or skipped when it is drawn."""
        checks_all = getattr(self, "check", "all") == "all"
        return tasks if checks_all else UncheckedTasks(tasks, on_bad_row=getattr(self, "on_bad_row", "refuse"))

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        yield from held_out_problems(self.held_out, at, eval_split)


class ImageData(StoredData):
    """Data with stored images."""

    size: Pixels | None = None
    """Height and width in pixels to which every image is resized; null uses the size of the model."""
    on_bad_row: OnBadRow = "refuse"
    """What to do about an unusable row: stop before training, or leave it out with a warning."""
    thought_keys: tuple[str, ...] = Field(default=(), exclude_if=lambda keys: not keys)
    """If the values of the column ``thought`` are maps: the keys of the map that make up the chain of thought, in this order, as
    lines "key: value". An empty list uses all values without their keys."""
    check: Literal["all", "first"] | Count = Field(default="all", exclude_if=lambda check: check == "all")
    """Rows whose images are decoded before training: all, the first 64, or this number of rows, drawn with the recipe's seed. The
    result is stored, and the next start decodes only new and changed files. If not all rows are checked, an unusable row may be
    found only when it is drawn: the run then stops, or takes the next row if ``on_bad_row`` is "skip"."""

    @property
    def image_size(self) -> Pixels | None:  # type: ignore[override]
        return self.size

    def all_tasks(self, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Sequence[Task]:
        return usable_tasks(self.rows(seed=0), size=size, on_bad_row=on_bad_row)


def usable_tasks(rows: Rows, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Subset:
    """The tasks of all usable rows, with images resized to ``size``, (height, width) in px. Raises ValueError under the same
    conditions as ``accept_rows``."""
    return Subset(Tasks(rows, resize=resize_to(size)), accept_rows(rows, on_bad_row=on_bad_row).indices)


def at_most(heldout: Sequence[int], context: DataContext, *, held_out: float | str = 0) -> Sequence[int]:
    """At most ``context.eval_tasks`` of the held-out rows, drawn with the evaluation's seed. Logs a warning if the recipe holds out
    all rows (``held_out`` is "all") and some are left out."""
    if len(heldout) <= context.eval_tasks:
        return heldout
    if held_out == "all":
        _log.warning(
            "data.held_out is 'all', but eval.tasks limits the evaluation to %d of %d rows; set eval.tasks to %d to use all",
            context.eval_tasks,
            len(heldout),
            len(heldout),
        )
    return limit(heldout, n=context.eval_tasks, seed=context.eval_seed)


def held_out_problems(held_out: float | str, at: str, eval_split: SplitName | None) -> Iterator[str]:
    """The problems of a ``held_out`` that holds out rows which no evaluation uses, or that leaves an evaluation without tasks."""
    if eval_split == "train" and held_out:
        yield f"eval.split: train evaluates on training tasks, so none need be held out; use {at}.held_out 0, or another split"
    elif eval_split not in (None, "train") and not held_out:
        yield (
            f"{at}.held_out: 0 leaves no tasks for evaluation; give 0.1, 'all' to evaluate on every row without training, or "
            "eval.split train if there are too few rows"
        )


def require_training_rows(held_out: float | str, context: DataContext) -> None:
    """Raise ValueError if a run that trains holds out all rows."""
    if held_out == "all" and context.trains:
        raise ValueError(
            'data.held_out: "all" leaves nothing to train on; it is for `retouch eval`. For training use 0.1, or a number of rows'
        )


def resize_to(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """The (width, height) of images of ``size``, (height, width) in px; None if images keep their sizes."""
    return None if size is None else (size[1], size[0])
