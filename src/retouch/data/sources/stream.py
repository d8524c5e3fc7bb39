"""Data sets that are read while the run trains: parquet files, WebDataset tar files and other formats, on disk or on the Hub, and
``datasets.IterableDataset`` objects of this process.

The data are neither converted nor copied first. Another process decodes the images before the step that needs them
(``streaming.py``). The held-out tasks are the first rows; rows with an image of a held-out row are never trained on.
"""

from __future__ import annotations

import glob
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from retouch.config.consent import data_path, require_no_links_out
from retouch.config.section import Count, Pixels, StepInterval, live_object
from retouch.data.base import DataContext, DataSets, DataSource, held_out_problems, resize_to
from retouch.data.checks import OnBadRow, accept_rows, combined_content
from retouch.data.rows import Layout, find_columns, require_instruction, split_keys
from retouch.data.sources.hub import COLUMNS, embedded_image, encoded_image, hash_table, read_table, require_plain_features
from retouch.data.tasks import Subset, Tasks
from retouch.types import Json, SplitName, TaskContents

if TYPE_CHECKING:
    import datasets

_FORMATS = {".parquet": "parquet", ".tar": "webdataset", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_SPLIT = {
    *("ExamplesIterable", "ArrowExamplesIterable", "MappedExamplesIterable", "FilteredExamplesIterable", "SelectColumnsIterable"),
    *("FormattedExamplesIterable", "RebatchedArrowExamplesIterable", "VerticallyConcatenatedMultiSourcesExamplesIterable"),
}
"""Classes of the ``datasets`` library: parts of a stream whose shards together have exactly the rows of the stream."""
_WEBDATASET = {"__key__": "id", "txt": "instruction", "jpg": "image", "jpeg": "image", "png": "image", "webp": "image"}


class StreamedData(DataSource):
    """Rows that are read while the run trains."""

    has_length = False
    name: ClassVar[str] = "train_dataset"
    """The name of the stream in messages."""

    size: Pixels | None = None
    """Height and width in pixels to which every image is resized; null uses the size of the model."""
    columns: dict[str, str] = Field(default={})
    """Map from a field (``instruction``, ``image``, ``target``, ...) to the column of the data set, if their names differ."""
    held_out: StepInterval = 64
    """Number of rows that are held out for evaluation: the first rows, in the order of the files. Training rows with one
    of their images are left out."""
    shuffle: Count = 1000
    """Number of rows that are shuffled together; one process of each rank keeps this number of encoded rows in memory. The order of
    the shards is shuffled too. Both orders change with each pass and depend on the recipe's seed."""
    ahead: StepInterval = 2
    """Number of steps whose tasks a process of each rank reads and decodes in advance; 0 loads them when the step begins."""
    check: Count = 64
    """Number of training rows at the start of the stream that are decoded before training. All other rows are checked when they are
    drawn."""
    on_bad_row: OnBadRow = "refuse"
    """What to do about an unusable row: stop the run, or take another row with a warning."""
    tags: tuple[str, ...] = ()
    """Columns whose values become tags of the tasks (``["task_type"]``): evaluations have a row for each value."""
    thought_keys: tuple[str, ...] = ()
    """If the values of the column ``thought`` are maps: the keys of the map that make up the chain of thought; an empty list uses
    all values."""

    @abstractmethod
    def open(self) -> datasets.IterableDataset:
        """The stream. Raises ValueError if it does not exist or cannot be opened."""

    @abstractmethod
    def layout(self, names: Sequence[str]) -> Layout:
        """How rows with the columns ``names`` are read. Raises ValueError for a missing column."""

    @property
    def image_size(self) -> Pixels | None:  # type: ignore[override]
        return self.size

    def contents(self) -> TaskContents:
        return TaskContents(reference=None if "reference" in self.columns else False)

    def build(self, context: DataContext) -> DataSets:
        from retouch.data.streaming import RowList, StreamOrder, StreamReader, TaskStream

        allowed = self.refuse_test_sets(trains=context.trains)
        dataset = self.open().with_format(None)
        dataset = dataset.decode(False) if dataset.features else dataset
        skip = self.on_bad_row == "skip"
        layout = self.layout(_columns(dataset, self.name))
        # One part after ``take``, ``skip``, ``interleave_datasets`` and the like: ``shard`` would apply these to each part.
        split = all(type(part).__name__ in _SPLIT and not getattr(part, "with_indices", False) for part in _parts(dataset))
        shards = max(1, int(dataset.num_shards)) if split else 1
        reader = StreamReader(dataset, layout, context.required, shards=shards, skip=skip)
        in_order = (row for shard in range(reader.shards) for _, row, _ in reader.rows(shard) if row is not None)
        on_train = context.eval_split == "train"
        away = list(islice(in_order, 0 if on_train else self.held_out))
        keys = {key for row in away for key in split_keys(row)}
        first = list(islice((row for row in in_order if keys.isdisjoint(split_keys(row))), self.check))
        if not away and not first:
            raise ValueError(f"{self.name}: no rows" + (" that can be used" if skip else ""))
        if not first:
            raise ValueError(f"{self.name}: all {len(away)} rows are held out; give more rows, or hold out fewer (data.held_out)")
        resize = resize_to(self.size or context.size)
        found = accept_rows(RowList([*away, *first]), on_bad_row=self.on_bad_row, resize=resize)
        heldout = [away[index] for index in found.indices if index < len(away)]
        first = [first[index - len(away)] for index in found.indices if index >= len(away)]
        if not first or (away and not heldout):
            raise ValueError(f"{self.name}: none of its first {len(away) + self.check} rows can be used")
        training = Tasks(RowList(first), resize=resize)
        evaluation = training if on_train else Tasks(RowList(heldout), resize=resize)
        training_rows = replace(reader, excluded=frozenset(keys))
        order = StreamOrder(training_rows, context.seed, self.shuffle)
        stream = TaskStream(order, resize=resize, first=training, ahead=self.ahead, skip=skip)
        chosen = Subset(evaluation, range(min(len(evaluation), context.eval_tasks)))
        content = combined_content([each for index, each in found.contents.items() if index >= len(away)])
        return DataSets(stream, chosen, allowed, found.problems, content=content)

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        for problem in held_out_problems(self.held_out, at, eval_split):
            yield problem.replace("give 0.1", "give a number of rows")


class StreamData(StreamedData):
    """Parquet files, WebDataset tar files and other formats of the ``datasets`` library, read while the run trains."""

    path_keys = ("path",)
    on_hub = True

    kind: Literal["stream"] = "stream"
    path: str
    """Id on the Hub, a folder, a file, or a pattern such as ``shards/train-*.tar``."""
    config: str | None = None
    """Configuration of the data set; null if there is only one."""
    revision: str | None = None
    """Commit or tag; null uses the newest."""
    split: str = "train"
    """Split of the data set; files without splits are ``train``."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.path}[{self.split}]"

    def keys_for_all(self, path: str) -> dict[str, Json]:
        """The keys of ``HubData``, because a stream holds out only its first rows."""
        kept = {"config", "split", "columns", "size", "on_bad_row", "tags", "thought_keys"}
        revision = self.revision if path == self.path else None  # a commit of one data set
        keys = self.model_dump(mode="json", include=kept)
        return {"kind": "hub", "path": path, **keys, "revision": revision, "held_out": "all"}

    def open(self) -> datasets.IterableDataset:
        """A stream with one shard for each file (for each row group of local parquet files). Raises ValueError if there is no such
        data set or split, for links out of the data set, or if a file cannot be read."""
        import datasets
        import pyarrow

        path, options = Path(self.path), {"split": self.split, "streaming": True}
        if path.exists():
            data_path(path)
        local = path.exists() or any(letter in self.path for letter in "*?[")
        if local and self.revision is not None:
            raise ValueError(f"{self.path} is on this disk and has no revision {self.revision!r}; leave revision out")
        if path.is_dir():
            require_no_links_out(path)
        named = sorted(glob.glob(self.path, recursive=True)) if local and not path.is_dir() else []
        files = [str(data_path(file)) for file in named]
        try:
            if path.is_dir():
                found = datasets.load_dataset(str(path.resolve()), self.config, **options)
            elif local:
                suffixes = {Path(file).suffix for file in named}
                if not named:
                    raise ValueError("no file matches this name")
                if len(suffixes) > 1 or not suffixes <= _FORMATS.keys():
                    raise ValueError(f"files of the types {', '.join(sorted(suffixes))}; give one of {', '.join(_FORMATS)}")
                found = datasets.load_dataset(_FORMATS[suffixes.pop()], data_files={self.split: files}, **options)
            else:
                found = datasets.load_dataset(self.path, self.config, revision=self.revision, **options)
            return found.reshard() if local else found
        except (datasets.exceptions.DatasetsError, RuntimeError, OSError, ValueError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.path}: cannot be opened as a stream: {error}") from error

    def layout(self, names: Sequence[str]) -> Layout:
        columns = _named_columns(names, self.columns, self.name)
        root = Path(self.path)
        allowed = (root.resolve() if root.is_dir() else root.resolve().parent,) if root.exists() else ()
        to_image = partial(embedded_image, allowed=allowed)
        return Layout(self.name, Path(self.path).name, columns, self.tags, to_image, self.thought_keys)


class IterableData(StreamedData):
    """A ``datasets.IterableDataset`` object of this Python process."""

    kind: Literal["iterable"] = "iterable"
    stream: str
    """Name of the object."""
    evaluation: str | None = None
    """Hash of the rows of the table on which the run is evaluated; null holds out rows of the stream."""

    _stream: datasets.IterableDataset | None = PrivateAttr(default=None)
    _evaluation: Any = PrivateAttr(default=None)

    @classmethod
    def of(
        cls, stream: datasets.IterableDataset, *, evaluation: Any = None, columns: Mapping[str, str] | None = None, **keys: Any
    ) -> IterableData:
        """The section for a stream. ``evaluation``: a table for evaluation. ``keys``: other keys of the section. Raises ValueError
        for a stream that cannot be resumed, or that has no instructions."""
        require_resumable(stream, "train_dataset")
        if evaluation is not None and not hasattr(evaluation, "__len__"):
            raise ValueError("eval_dataset: a streaming data set has no length; give a datasets.Dataset or a list of its rows")
        _named_columns(_columns(stream, "train_dataset"), columns or {}, "train_dataset")
        if evaluation is not None:
            keys["held_out"] = 0
        section = cls(
            stream=f"{getattr(stream.info, 'dataset_name', None) or 'stream'}-{stream.num_shards}",
            evaluation=None if evaluation is None else hash_table(evaluation),
            columns=dict(columns or {}),
            **keys,
        )
        section._stream, section._evaluation = stream, evaluation
        return section

    def objects(self) -> dict[str, Any]:
        given = {f"stream:{self.stream}": self._stream, f"table:{self.evaluation}": self._evaluation}
        return {name: found for name, found in given.items() if found is not None}

    def open(self) -> datasets.IterableDataset:
        found = self._stream if self._stream is not None else live_object(f"stream:{self.stream}", key="data")
        require_resumable(found, "train_dataset")
        return found

    def layout(self, names: Sequence[str]) -> Layout:
        columns = _named_columns(names, self.columns, self.name)
        require_plain_features(self.open().features or {}, columns, self.name)
        return Layout(self.name, self.name, columns, self.tags, encoded_image, self.thought_keys)

    def build(self, context: DataContext) -> DataSets:
        sets = super().build(context)
        if self.evaluation is None:
            return sets
        table = self._evaluation if self._evaluation is not None else live_object(f"table:{self.evaluation}", key="data")
        rows = read_table(
            table,
            columns=self.columns,
            name="eval_dataset",
            tag_keys=self.tags,
            thought_keys=self.thought_keys,
            digest=self.evaluation,
        )
        tasks = Tasks(rows, resize=resize_to(self.size or context.size))
        found = accept_rows(rows, on_bad_row=self.on_bad_row, required=context.required, resize=tasks.resize)
        heldout = Subset(tasks, found.indices[: context.eval_tasks])
        return replace(sets, heldout=heldout, problems=(*sets.problems, *found.problems))

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        if self.evaluation is None:
            yield from super().problems(at, eval_split=eval_split)


def require_resumable(stream: Any, name: str) -> None:
    """Raise ValueError for a stream whose position cannot be stored, or that is one rank's part of another stream."""
    if not all(hasattr(stream, method) for method in ("state_dict", "load_state_dict", "shard", "num_shards")):
        raise ValueError(
            f"{name}: {type(stream).__name__} is not a datasets.IterableDataset; wrap it with IterableDataset.from_generator"
        )
    if getattr(stream, "_distributed", None) is not None:
        raise ValueError(f"{name}: this is one rank's part of a stream; give the whole stream, which Retouch splits over the ranks")
    for part in _parts(stream):
        if type(part).__name__.startswith("BufferShuffled"):
            raise ValueError(
                f"{name}: the buffer of .shuffle() is lost when a run resumes, and so are the rows in it; give the stream without "
                "shuffle(), because Retouch shuffles it (data.shuffle)"
            )


def _parts(stream: datasets.IterableDataset) -> Iterator[Any]:
    """The parts of a stream: its source, and the functions that are applied to it."""
    parts = [getattr(stream, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        yield part
        inner = (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ()))
        parts += [each for each in inner if each is not None]


def _columns(dataset: datasets.IterableDataset, name: str) -> list[str]:
    """The names of the columns, or the keys of the first row if the stream does not declare its columns."""
    if dataset.column_names:
        return list(dataset.column_names)
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError(f"{name}: no rows")
    if not isinstance(row, Mapping):
        raise ValueError(f"{name}: a row is {type(row).__name__}; each row is a dictionary with a `prompt`")
    return list(row)


def _named_columns(names: Sequence[str], columns: Mapping[str, str], name: str) -> dict[str, str]:
    """The column of each field; the file types of a WebDataset are recognised as columns too."""
    found, _ = find_columns(names, columns=columns, defaults=COLUMNS, file=name)
    if "__key__" in names:
        for column, field in _WEBDATASET.items():
            if column in names and field not in found:
                found[field] = column
    require_instruction(found, names, file=name)
    return found
