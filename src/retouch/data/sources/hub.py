"""Hugging Face data sets, from the Hub or from disk, with a column map.

No code of a data set is run: the ``datasets`` library refuses data sets with code. Rows stay on disk and images stay encoded until
they are accessed. An image that is stored as a path is opened only in the folder of the data set or in the caches of the library
(unpacked archives), so that a table cannot name other files of this machine. ``datasets`` is imported when rows are read.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from PIL import ExifTags, Image
from pydantic import Field, PrivateAttr

from retouch.config.consent import data_path, require_no_links_out
from retouch.config.section import NonEmpty, live_object
from retouch.data.base import DataContext, DataSets, ImageData, at_most
from retouch.data.checks import combined_content, file_state
from retouch.data.images import EncodedImage, in_srgb
from retouch.data.rows import Identity, Layout, ParsedRows, Problem, Rows, find_columns, is_json, prompt_rows, require_instruction
from retouch.data.tasks import Subset, limit
from retouch.types import SplitName, TaskContents

if TYPE_CHECKING:
    import datasets

_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("image", "images"),
    "mask": ("mask",),
    "reference": ("reference",),
    "target": ("target",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "text": ("text",),
    "source": ("source",),
    "thought": ("thought", "thinking", "CoT"),
    "later": ("later",),
}
Table: TypeAlias = "Sequence[Mapping[str, Any]] | datasets.Dataset"

_NOT_IN_PNG = {  # mode: the mode to which it is converted
    **dict.fromkeys(("CMYK", "HSV", "LAB", "RGBX", "YCbCr"), "RGB"),
    **{"La": "LA", "PA": "RGBA", "RGBa": "RGBA"},
}
COLUMNS = {
    **_COLUMNS,
    **{"image": ("image", "images", "source_image"), "target": ("target", "target_image")},
    **{"chosen": ("chosen", "chosen_image"), "rejected": ("rejected", "rejected_image")},
}
"""The possible column names of each field, for fields that ``columns`` does not contain."""


class HubData(ImageData):
    """A Hugging Face data set by id or path."""

    on_hub = True

    kind: Literal["hub"] = "hub"
    path: NonEmpty
    """Id or folder of the data set."""
    config: str | None = None
    """Configuration of the data set; null if there is only one."""
    revision: str | None = None
    """Commit or tag; null uses the newest."""
    split: str = "train"
    """Split of the data set."""
    columns: dict[str, str]
    """Map from a field (``instruction``, ``image``, ``target``, ...) to the column of the data set."""

    def rows(self, *, seed: int) -> ParsedRows:
        if Path(self.path).exists():
            data_path(self.path)
        return read_hub(
            self.path,
            split=self.split,
            config=self.config,
            revision=self.revision,
            columns=self.columns,
            tag_keys=self.tags,
            thought_keys=self.thought_keys,
        )

    def contents(self) -> TaskContents:
        return TaskContents(reference=None if "reference" in self.columns else False)


def hub_rows(dataset: datasets.Dataset, layout: Layout, *, problems: Sequence[Problem], folder: Path | None = None) -> ParsedRows:
    """The rows of a data set of the ``datasets`` library. The ``line`` of a row is its number, from 1. ``folder``: the folder of
    the data set, if it is on this machine."""
    cells = dataset.with_format("arrow")  # raw cells, because the library would decode images without a size limit

    def fields(index: int) -> tuple[int, Mapping[str, Any]]:
        (found,) = cells[index].to_pylist()
        return index + 1, found

    def identity() -> Identity:
        """From the library's fingerprint, and the sizes and times of the files of the table."""
        names = sorted({str(file["filename"]) for file in dataset.cache_files})
        states = [(str(Path(name).name), *file_state(name)[1:]) for name in names]
        return Identity(layout.digest(dataset._fingerprint, repr(states)), layout.file, folder)

    return ParsedRows(layout, len(dataset), fields, problems=problems, identity=identity)


def read_hub(
    path: str | Path,
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    tag_keys: tuple[str, ...] = (),
    thought_keys: tuple[str, ...] = (),
    name: str | None = None,
) -> ParsedRows:
    """The rows of one split of a data set.

    ``path``: on disk, a folder that ``save_to_disk`` wrote, a folder that ``load_dataset`` reads (parquet, imagefolder), or a
    parquet file; otherwise an id on the Hub. ``split`` may be None if there is only one split. ``revision``: a commit on the Hub,
    so that the data cannot change during a run. ``columns``: the column of a field, if their names differ. ``tag_keys`` and
    ``thought_keys``: as in ``read_folder``. ``name``: the prefix of the ids of rows without an id. Raises ValueError for an unknown
    data set, split or column, a file that is not parquet, links out of the data set, and files that the library cannot read.
    """
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE
    from pyarrow import ArrowException

    local = Path(path).exists()
    if local and revision is not None:
        raise ValueError(f"{path} is on this disk and has no revision {revision!r}; leave revision out")
    if Path(path).is_file() and Path(path).suffix != ".parquet":
        raise ValueError(
            f"{path}: not a parquet file; for CSV or JSONL use a folder with metadata.csv or metadata.jsonl, or a prompt list"
        )
    if Path(path).is_dir():
        require_no_links_out(Path(path))
    elif local:
        data_path(path)
    try:
        where = Path(path)
        if (where / "state.json").is_file() or (where / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(where))
        elif where.is_file():
            loaded = datasets.load_dataset("parquet", data_files=str(where.resolve()), split=split)
        else:  # an absolute path: a folder "json" would be read as the name of a format
            place = str(where.resolve()) if where.is_dir() else str(path)
            loaded = datasets.load_dataset(place, config, split=split, revision=revision)
    except (datasets.exceptions.DatasetsError, ArrowException, RuntimeError, OSError, ValueError) as error:
        of_library = isinstance(error, datasets.exceptions.DatasetsError) and error.__cause__ is not None
        reason = f"{error}: {error.__cause__}" if of_library else str(error)
        raise ValueError(f"{path}: `datasets` cannot read it: {reason}") from error
    if isinstance(loaded, datasets.Dataset):
        if split is not None and loaded.split is not None and str(loaded.split) != split:
            raise ValueError(f"{path}: this is the split {str(loaded.split)!r}, not {split!r}")
        dataset, file = loaded, f"{path}[{split or loaded.split or 'all'}]"
    else:
        chosen = split or (next(iter(loaded)) if len(loaded) == 1 else None)
        if chosen not in loaded:
            raise ValueError(f"{path}: set split to one of the splits: {', '.join(loaded)}")
        dataset, file = loaded[chosen], f"{path}[{chosen}]"
    if not len(dataset):
        raise ValueError(f"{file}: no rows")
    # Image files in a folder, and not a table that contains images.
    plain = local and not columns and {*dataset.column_names} <= {"image", "label"} and Path(path).is_dir()
    if plain and not any(next(Path(path).rglob(pattern), None) for pattern in ("*.parquet", "*.arrow")):
        raise ValueError(
            f"{path}: a folder of images without metadata.jsonl; write one, with a line for each image: "
            '{"file_name": "NAME.png", "instruction": "TEXT"}'
        )
    found, notes = find_columns(dataset.column_names, columns=columns or {}, defaults=_COLUMNS, file=file)
    require_instruction(found, dataset.column_names, file=file)
    if not local and revision is None:
        notes.append(Problem(file, 0, "no revision is given, so the data may change during the run; pin a commit", "note"))
    caches = [Path(datasets.config.HF_DATASETS_CACHE), Path(HF_HUB_CACHE)]
    allowed = tuple(root.resolve() for root in ([Path(path), *caches] if local else caches))
    layout = Layout(file, name or Path(path).name, found, tag_keys, partial(embedded_image, allowed=allowed), thought_keys)
    folder = Path(path) if local else None
    return hub_rows(dataset, layout, problems=notes, folder=folder if folder is None or folder.is_dir() else folder.parent)


def embedded_image(value: Any, allowed: tuple[Path, ...]) -> EncodedImage:
    """The image in a cell: bytes, or the library's struct of bytes and path. ``allowed``: folders in which a path may be opened.

    Raises ValueError for any other value, and for a path outside these folders.
    """
    cell = {"bytes": value, "path": None} if isinstance(value, bytes) else value
    if not isinstance(cell, dict) or not {"bytes", "path"} >= cell.keys():
        raise ValueError(f"should be an image, not {value!r:.40}; for file names use a folder with metadata.jsonl")
    if cell.get("bytes"):
        return EncodedImage(str(cell.get("path") or "an image in the table"), cell["bytes"])
    if not cell.get("path"):
        raise ValueError("an image without bytes")
    path = Path(cell["path"]).resolve()
    for root in allowed:
        if path.is_relative_to(root):
            return EncodedImage(path.relative_to(root).as_posix(), path)
    raise ValueError(f"{cell['path']!r} is outside the data set and is not opened")


_log = logging.getLogger(__name__)


class TableData(ImageData):
    """A table of this Python process. Held-out tasks come from ``evaluation`` if it is given, else from the table itself."""

    path_keys = ()

    kind: Literal["table"] = "table"
    rows_: str
    """Hash of the table's rows."""
    evaluation: str | None = None
    """Hash of the rows of a second table on which the run is evaluated; null holds out rows of the first table."""
    columns: dict[str, str] = Field(default={})
    """Map from a field (``instruction``, ``image``, ``target``, ...) to the column of the table, if their names differ."""
    has: tuple[str, ...] = ()
    """The fields for which the table has a column."""

    _table: Table | None = PrivateAttr(default=None)
    _evaluation: Table | None = PrivateAttr(default=None)

    @classmethod
    def of(
        cls, table: Table, *, evaluation: Table | None = None, columns: Mapping[str, str] | None = None, **keys: Any
    ) -> TableData:
        """The section for a table. ``keys``: other keys of the section. Raises ValueError for a table that is empty or has no
        instructions."""
        names = _names(table, "train_dataset")
        found, _ = find_columns(names, columns=columns or {}, defaults=COLUMNS, file="train_dataset")
        require_instruction(found, names, file="train_dataset")
        if evaluation is not None:
            _names(evaluation, "eval_dataset")
        section = cls(
            rows_=hash_table(table),
            evaluation=None if evaluation is None else hash_table(evaluation),
            columns=dict(columns or {}),
            has=tuple(found),
            **keys,
        )
        section._table, section._evaluation = table, evaluation
        return section

    def other_columns(self) -> dict[str, list[str]]:
        """The columns that reward functions receive by their own names, sorted, by table (``train_dataset``, ``eval_dataset``): all
        that are not read as a field. Empty if the tables are not in this section."""
        found: dict[str, list[str]] = {}
        for name, table in {"train_dataset": self._table, "eval_dataset": self._evaluation}.items():
            if table is not None:
                names = _names(table, name)
                fields, _ = find_columns(names, columns=self.columns, defaults=COLUMNS, file=name)
                read = {*fields.values(), *_not_json(table, names)}
                found[name] = sorted({*names, *self.tags} - (read - set(self.tags)))
        return found

    def objects(self) -> dict[str, Any]:
        given = {self.rows_: self._table, self.evaluation: self._evaluation}
        return {f"table:{name}": table for name, table in given.items() if table is not None}

    def rows(self, *, seed: int) -> Rows:
        table = self._table if self._table is not None else live_object(f"table:{self.rows_}", key="data")
        return self._read(table, name="train_dataset", digest=self.rows_)

    def build(self, context: DataContext) -> DataSets:
        """The training tasks and the held-out tasks. If there is a second table, all rows of the first are for training."""
        if self.evaluation is None:
            return super().build(context)
        other = self._evaluation if self._evaluation is not None else live_object(f"table:{self.evaluation}", key="data")
        held = self._read(other, name="eval_dataset", digest=self.evaluation)
        tasks, found = self.checked_tasks(self.rows(seed=context.seed), context)
        held_tasks, found_held = self.checked_tasks(held, context)
        held_images = {key for keys in found_held.keys for key in keys}
        if shared := sum(not held_images.isdisjoint(keys) for keys in found.keys):
            _log.warning("%d of %d rows of train_dataset have an image that is also in eval_dataset", shared, len(found.keys))
        train = found.indices if self.limit is None else limit(found.indices, n=self.limit, seed=context.seed)
        heldout = at_most(found_held.indices, context)
        problems, content = (*found.problems, *found_held.problems), combined_content(list(found.contents.values()))
        training, evaluation = self.as_drawn(Subset(tasks, train)), self.as_drawn(Subset(held_tasks, heldout))
        return DataSets(training, evaluation, (), problems, content=content)

    def _read(self, table: Table, *, name: str, digest: str | None) -> Rows:
        return read_table(table, columns=self.columns, name=name, tag_keys=self.tags, thought_keys=self.thought_keys, digest=digest)

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        if self.evaluation is None:
            yield from super().problems(at, eval_split=eval_split)

    def contents(self) -> TaskContents:
        return TaskContents(
            images=None if "image" in self.has else False,
            mask=None if "mask" in self.has else False,
            reference=None if "reference" in self.has else False,
            target=None if "target" in self.has else False,
            text=None if "text" in self.has else False,
            pairs=None if {"chosen", "rejected"} <= set(self.has) else False,
        )


def read_table(
    table: Table,
    *,
    columns: Mapping[str, str],
    name: str,
    tag_keys: tuple[str, ...] = (),
    thought_keys: tuple[str, ...] = (),
    digest: str | None = None,
) -> Rows:
    """The rows of a table. ``name``: the name of the table in messages. ``digest``: the result of ``hash_table``, if it is known.
    The other arguments are as in ``read_folder``.

    Raises ValueError for a table that is empty or of an unknown type.
    """
    names = _names(table, name)
    found, notes = find_columns(names, columns=columns, defaults=COLUMNS, file=name)
    lost = [column for column in _not_json(table, names) if column not in found.values()]
    notes += [
        Problem(name, 0, f"the column {column!r} has values that are not JSON; rewards do not get it", "note") for column in lost
    ]
    if _is_dataset(table):
        dataset: Any = table
        require_plain_features(dataset.features, found, name)
        layout = Layout(name, name, found, tag_keys, partial(embedded_image, allowed=(Path("/"),)), thought_keys)
        return prompt_rows(hub_rows(dataset.select_columns(names), layout, problems=notes))
    layout = Layout(name, name, found, tag_keys, encoded_image, thought_keys)
    known = None if digest is None else (lambda: Identity(layout.digest(digest), name))
    rows: Sequence[Mapping[str, Any]] = table
    return prompt_rows(ParsedRows(layout, len(rows), lambda at: (at + 1, dict(rows[at])), problems=notes, identity=known))


def encoded_image(value: Any) -> EncodedImage:
    """The image in a row of a list: a PIL image, the bytes or the path of a file, or both as the ``datasets`` library stores them.
    Raises ValueError for any other value."""
    if isinstance(value, Mapping):
        return embedded_image(dict(value), (Path("/"),))
    if hasattr(value, "save") and hasattr(value, "tobytes"):
        buffer = io.BytesIO()
        if value.mode in ("F", "I"):
            raise ValueError(f"an image of mode {value.mode}, whose range is not known; give image.convert('RGB')")
        try:
            image = in_srgb(value) if value.mode == "CMYK" else value
            image = image.convert(_NOT_IN_PNG[image.mode]) if image.mode in _NOT_IN_PNG else image
            turn, exif = value.getexif().get(ExifTags.Base.Orientation), Image.Exif()
            if turn is not None:  # Pillow does not write the rotation unless it is given
                exif[ExifTags.Base.Orientation] = turn
            image.save(buffer, "PNG", exif=exif)
        except OSError as error:
            raise ValueError(f"an image of mode {value.mode}: {error}; give image.convert('RGB')") from None
        return EncodedImage("an image of the table", buffer.getvalue())
    if isinstance(value, bytes):
        return EncodedImage("an image of the table", value)
    if isinstance(value, str | Path):
        return EncodedImage(str(value), Path(value))
    raise ValueError(f"should be a PIL image, a path or the bytes of a file, not {type(value).__name__}")


def hash_table(table: Table) -> str:
    """A hash of the rows: the fingerprint of a ``datasets.Dataset``, or 16 hexadecimal digits for a list."""
    own = getattr(table, "_fingerprint", None)
    if own is not None:
        return str(own)
    digest = hashlib.sha256()
    for row in table:
        for key, value in sorted(row.items()):
            digest.update(f"{key}\0".encode())
            for part in value if isinstance(value, list | tuple) else [value]:
                if hasattr(part, "tobytes") and hasattr(part, "size"):
                    digest.update(f"{getattr(part, 'mode', '')}{part.size}".encode() + bytes(part.tobytes()))
                elif isinstance(part, bytes):
                    digest.update(part)
                else:
                    digest.update(json.dumps(part, default=str, sort_keys=True).encode() + b"\0")
    return digest.hexdigest()[:16]


def _names(table: Table, name: str) -> list[str]:
    """The columns of the table, in order. Raises ValueError as ``read_table`` does."""
    if hasattr(table, "take") and not hasattr(table, "__len__"):
        raise ValueError(f"{name}: a streaming data set has no length; load it without streaming=True, or give a list of its rows")
    if isinstance(table, Mapping):
        raise ValueError(f"{name}: a dictionary; give one split of it, for example dataset['train']")
    if type(table).__name__ == "DataFrame":
        call = "to_dicts()" if hasattr(table, "to_dicts") else 'to_dict("records")'  # polars, pandas
        raise ValueError(f"{name}: a DataFrame is read as a list of its rows; give df.{call}")
    if not hasattr(table, "__getitem__") or not hasattr(table, "__len__") or isinstance(table, str | bytes):
        raise ValueError(
            f"{name}: {type(table).__name__} is not a table; give a datasets.Dataset, a list of dictionaries or a folder"
        )
    if not len(table):
        raise ValueError(f"{name}: no rows")
    if _is_dataset(table):
        dataset: Any = table
        shown = dataset.format
        if shown["type"] == "custom":
            raise ValueError(
                f"{name}: has a transform (set_transform or with_transform), which may give other rows at each access; apply it "
                "once with dataset.map(...), or give list(dataset)"
            )
        return list(dataset.column_names if shown["output_all_columns"] else shown["columns"])
    wrong = next((row for row in table if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise ValueError(f"{name}: a row is {type(wrong).__name__}; each row is a dictionary with a `prompt`")
    return list(dict.fromkeys(key for row in table for key in row))


def require_plain_features(features: Mapping[str, Any], columns: Mapping[str, str], name: str) -> None:
    """Raise ValueError for columns of a data set that give other values than those that are stored and read: images that are
    converted to another mode, and names of classes, whose numbers are stored, as a text."""
    for field, column in columns.items():
        feature = features.get(column)
        feature = getattr(feature, "feature", feature)  # of a list
        kind, mode = type(feature).__name__, getattr(feature, "mode", None)
        if kind == "Image" and mode not in ((None, "L") if field == "mask" else (None, "RGB")):
            raise ValueError(
                f"{name}: the column {column!r} converts its images to mode {mode!r}, and Retouch reads the stored images; convert "
                f"them once with map(), or read them as they are: cast_column({column!r}, datasets.Image())"
            )
        if kind == "ClassLabel" and field in ("instruction", "text", "thought"):
            raise ValueError(
                f"{name}: the column {column!r} has the numbers of classes, such as 0, and not their names; give the names: "
                f"dataset.map(lambda row: {{'name': dataset.features[{column!r}].int2str(row[{column!r}])}}), with "
                f"columns={{'{field}': 'name'}}"
            )


def _not_json(table: Table, names: Sequence[str]) -> list[str]:
    """The columns with values that are not JSON, such as images, dates and NaN, which ``meta`` does not have."""
    if _is_dataset(table):
        dataset: Any = table
        return [name for name in names if not _has_json(dataset.features[name])]
    return [name for name in names if not all(is_json(row.get(name)) for row in table)]


def _has_json(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return all(map(_has_json, feature.values()))
    if isinstance(feature, list) or hasattr(feature, "feature"):
        return _has_json(feature[0] if isinstance(feature, list) else feature.feature)
    kind = str(getattr(feature, "dtype", ""))
    return hasattr(feature, "num_classes") or kind.startswith(("int", "uint", "float", "bool", "string", "large_string", "null"))


def _is_dataset(table: Any) -> bool:
    return hasattr(table, "column_names") and hasattr(table, "with_format")
