"""Rows that are objects of this Python process: a ``datasets.Dataset``, or a list of dictionaries."""

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

from retouch.config.live import live_object
from retouch.data.base import DataContext, DataSets, ImageData, at_most, resize_to
from retouch.data.examination import combined_content
from retouch.data.images import EncodedImage, in_srgb
from retouch.data.rows import Identity, Layout, Problem, PromptRows, Row, Rows, is_json
from retouch.data.sampler import Subset
from retouch.data.sources.columns import find_columns
from retouch.data.sources.hub import HubRows, embedded_image
from retouch.data.split import limit
from retouch.data.tasks import Tasks
from retouch.data.validation import AcceptedRows, accept_rows
from retouch.types import SplitName, TaskContents

if TYPE_CHECKING:
    import datasets

_log = logging.getLogger(__name__)

Table: TypeAlias = "Sequence[Mapping[str, Any]] | datasets.Dataset"

_NOT_IN_PNG = {  # mode: the mode to which it is converted
    **dict.fromkeys(("CMYK", "HSV", "LAB", "RGBX", "YCbCr"), "RGB"),
    **{"La": "LA", "PA": "RGBA", "RGBa": "RGBA"},
}
COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("image", "images", "source_image"),
    "mask": ("mask",),
    "reference": ("reference",),
    "target": ("target", "target_image"),
    "chosen": ("chosen", "chosen_image"),
    "rejected": ("rejected", "rejected_image"),
    "text": ("text",),
    "source": ("source",),
    "thought": ("thought", "thinking", "CoT"),
}
"""The possible column names of each field, for fields that ``columns`` does not contain."""


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
        if "instruction" not in found:
            raise ValueError(
                f"train_dataset: no column with the prompts; it has {', '.join(names)}. Call it `prompt` or `instruction`, or name "
                "it: columns={'instruction': '...'}"
            )
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
        train, found = self._accepted(self.rows(seed=context.seed), context)
        heldout, found_held = self._accepted(held, context)
        held_images = {key for keys in found_held.keys for key in keys}
        if shared := sum(not held_images.isdisjoint(keys) for keys in found.keys):
            _log.warning("%d of %d rows of train_dataset have an image that is also in eval_dataset", shared, len(found.keys))
        if self.limit is not None:
            train = Subset(train, limit(range(len(train)), n=self.limit, seed=context.seed))
        heldout = Subset(heldout, at_most(range(len(heldout)), context))
        problems, content = (*found.problems, *found_held.problems), combined_content(list(found.contents.values()))
        return DataSets(self.as_drawn(train), self.as_drawn(heldout), (), problems, content=content)

    def _read(self, table: Table, *, name: str, digest: str | None) -> Rows:
        return read_table(table, columns=self.columns, name=name, tag_keys=self.tags, thought_keys=self.thought_keys, digest=digest)

    def _accepted(self, rows: Rows, context: DataContext) -> tuple[Subset, AcceptedRows]:
        tasks = Tasks(rows, resize=resize_to(self.image_size or context.size))
        found = accept_rows(
            rows,
            on_bad_row=self.on_bad_row,
            required=context.required,
            check=self.check,
            seed=context.seed,
            resize=tasks.resize,
        )
        return Subset(tasks, found.indices), found

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
        return PromptRows(HubRows(dataset.select_columns(names), layout, problems=tuple(notes)))
    layout = Layout(name, name, found, tag_keys, encoded_image, thought_keys)
    return PromptRows(ListRows(table, layout, problems=tuple(notes), digest=digest))


class ListRows:
    """The rows of a list of dictionaries. The ``line`` of a row is its number, from 1."""

    def __init__(
        self, table: Sequence[Mapping[str, Any]], layout: Layout, *, problems: tuple[Problem, ...], digest: str | None = None
    ) -> None:
        self.problems = problems
        self._digest = digest
        self._table = table
        self._layout = layout

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        return self._layout.parse(dict(self._table[index]), line=index + 1)

    def identity(self) -> Identity | None:
        """The identity of the list, if its hash is known and its rows can have images."""
        known = self._digest is not None and self._layout.has_images
        return Identity(self._layout.digest(self._digest or ""), self._layout.file) if known else None


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
            image.save(buffer, "PNG", exif=_rotation(value))
        except OSError as error:
            raise ValueError(f"an image of mode {value.mode}: {error}; give image.convert('RGB')") from None
        return EncodedImage("an image of the table", buffer.getvalue())
    if isinstance(value, bytes):
        return EncodedImage("an image of the table", value)
    if isinstance(value, str | Path):
        return EncodedImage(str(value), Path(value))
    raise ValueError(f"should be a PIL image, a path or the bytes of a file, not {type(value).__name__}")


def _rotation(image: Image.Image) -> Image.Exif:
    """The EXIF rotation of an image, which Pillow does not write unless it is given."""
    exif = Image.Exif()
    turn = image.getexif().get(ExifTags.Base.Orientation)
    if turn is not None:
        exif[ExifTags.Base.Orientation] = turn
    return exif


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
                digest.update(_content(part))
    return digest.hexdigest()[:16]


def _content(value: Any) -> bytes:
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{getattr(value, 'mode', '')}{value.size}".encode() + bytes(value.tobytes())
    if isinstance(value, bytes):
        return value
    return json.dumps(value, default=str, sort_keys=True).encode() + b"\0"


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
