"""Data with a metadata file: folders of images, in the layout of Hugging Face's imagefolder, and lists of prompts.

A line of a folder's ``metadata.jsonl`` or ``metadata.csv`` has ``file_name`` (or ``file_names``, ``image``, ``images``) and
``instruction`` (or ``prompt``), and may have ``target``, ``mask``, ``reference``, ``chosen`` and ``rejected`` (each also as
``target_file_name`` and so on), ``text``, ``id``, ``source``, ``thought`` and ``later`` (``retouch.data.rows``). File names are
relative to the metadata file, and no file outside the folder is ever opened. If no line names a source image, the tasks are
text-to-image tasks. All rows are kept in memory; for millions of rows use parquet and ``HubData``.

A list of prompts is a ``.txt`` file with one prompt per line, or a ``.jsonl`` or ``.csv`` file with ``prompt`` (or ``instruction``)
and the columns that a reward needs. As in Flow-GRPO's lists, the quoted text of a prompt is the text that the image should show.

Files are UTF-8. A byte-order mark and CRLF are accepted and noted. Blank lines are skipped. An unreadable line stays in the table
as an entry with the reason, so that all bad lines are reported together.
"""

import csv
import hashlib
import io
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from pydantic import Field

from retouch.config.consent import data_path
from retouch.config.packaged import shipped
from retouch.config.section import Count, NonEmpty
from retouch.data.base import ImageData, StoredData
from retouch.data.checks import accept_rows
from retouch.data.images import SUFFIXES, EncodedImage
from retouch.data.rows import (
    Identity,
    InvalidRow,
    Layout,
    MappedRows,
    ParsedRows,
    Problem,
    find_columns,
    prompt_rows,
    require_instruction,
)
from retouch.data.tasks import LoadedTasks, Subset, Tasks, load_task, random_crop
from retouch.records.files import strict_json
from retouch.types import Json, Task, TaskContents

METADATA = ("metadata.jsonl", "metadata.csv")
_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("file_name", "file_names", "image", "images"),
    "mask": ("mask", "mask_file_name"),
    "reference": ("reference", "reference_file_name"),
    "target": ("target", "target_file_name"),
    "chosen": ("chosen", "chosen_file_name"),
    "rejected": ("rejected", "rejected_file_name"),
    "text": ("text",),
    "source": ("source",),
    "thought": ("thought", "thinking", "CoT"),
    "later": ("later",),
}
_PROMPT_COLUMNS = {"id": ("id",), "instruction": ("prompt", "instruction"), "text": ("text",), "source": ("source",)}
_INSTRUCTION_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("image", "images", "file_name", "file_names"),
    "mask": ("mask",),
    "reference": ("reference",),
}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a metadata file. ``line``: its number, from 1. ``fields``: None for an unreadable line; then ``what`` is the
    reason."""

    line: int
    fields: Mapping[str, Json] | None
    what: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A metadata file. ``notes``: about the file as a whole. ``digest``: the SHA-256 digest of its content."""

    file: str
    entries: tuple[Entry, ...]
    notes: tuple[Problem, ...] = ()
    digest: str = ""

    def keys(self) -> list[str]:
        """The keys of all rows, in the order of their first appearance."""
        return list(dict.fromkeys(key for entry in self.entries for key in entry.fields or ()))


def table_rows(table: Table, layout: Layout, *, notes: Sequence[Problem] = ()) -> ParsedRows:
    """The rows of a metadata file; the result of their check is stored in the folder of the file."""

    def fields(index: int) -> tuple[int, Mapping[str, Json]]:
        entry = table.entries[index]
        if entry.fields is None:
            raise InvalidRow([Problem(layout.file, entry.line, entry.what)])
        return entry.line, entry.fields

    identity = Identity(layout.digest(table.digest), layout.file, Path(layout.file).parent)
    return ParsedRows(layout, len(table.entries), fields, problems=(*table.notes, *notes), identity=lambda: identity)


def read_metadata(path: Path, *, text_field: str = "text") -> Table:
    """The entries of a ``.jsonl``, ``.csv`` or ``.txt`` file; a line of a text file becomes ``{text_field: line}``.

    Raises ValueError for any other file type, a missing file, a link out of its folder (``data_path``), a CSV header with empty or
    repeated names, and a file without rows.
    """
    file = str(path)
    if path.suffix not in (".jsonl", ".csv", ".txt"):
        raise ValueError(f"{file}: metadata is read from .jsonl, .csv and .txt files")
    if not path.is_file():
        raise ValueError(f"{file}: no such file")
    data = data_path(path).read_bytes()
    notes = []
    if data.startswith(_BOM):
        data = data[len(_BOM) :]
        notes.append(Problem(file, 1, "begins with a byte-order mark, which is skipped", "note"))
    before = data.partition(b"\r\n")[0]
    if len(before) < len(data) and path.suffix != ".csv":  # CSV's own line end is CRLF
        notes.append(Problem(file, before.count(b"\n") + 1, "lines end in CRLF, which is read as a line end", "note"))
    is_csv, field = path.suffix == ".csv", None if path.suffix == ".jsonl" else text_field
    entries = tuple(_csv_entries(data, file) if is_csv else _line_entries(data, field))
    if not entries:
        raise ValueError(f"{file}: no rows")
    return Table(file, entries, tuple(notes), hashlib.sha256(data).hexdigest())


def _line_entries(data: bytes, text_field: str | None) -> Iterator[Entry]:
    # Not str.splitlines: it also splits at U+2028 and similar characters, which may occur inside a JSON string.
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            yield Entry(number, None, f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8")
            continue
        if text and text_field is not None:
            yield Entry(number, {text_field: text})
        if not text or text_field is not None:
            continue
        fields, what = None, ""
        try:
            fields = strict_json(text)
            json.dumps(fields, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair cannot be encoded
        except json.JSONDecodeError as error:
            what = f"not JSON: {error.msg} at column {error.colno}"
        except UnicodeEncodeError:
            what = "not JSON: half of a surrogate pair in a string"
        except ValueError as error:
            what = f"not JSON: {error}"
        if not what and not isinstance(fields, dict):
            what = f"should be a JSON object, not {type(fields).__name__}"
        yield Entry(number, None if what else fields, what)


def _csv_entries(data: bytes, file: str) -> Iterator[Entry]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}:{line}: not UTF-8; save the file as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise ValueError(f"{file}:1: the header is not CSV: {error}") from None
    if len(names) == 1 and (split := next((each for each in ";\t|" if each in names[0]), None)) is not None:
        raise ValueError(f"{file}:1: the columns are separated by {split!r}; separate them by commas, as CSV files do")
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{file}:1: the header has empty or repeated names: {names}")
    while True:
        number = reader.line_num + 1  # a quoted cell may span several lines: a row is numbered by its first line
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Entry(number, None, f"not CSV: {error}")
            continue
        if cells and len(cells) != len(names):
            yield Entry(number, None, f"{len(cells)} cells, but the header has {len(names)}")
        elif cells:
            yield Entry(number, {name: cell for name, cell in zip(names, cells, strict=True) if cell})


class FolderData(ImageData):
    """A folder of images with a ``metadata.jsonl``, in the layout of Hugging Face's imagefolder."""

    kind: Literal["folder"] = "folder"
    path: NonEmpty
    """The folder."""
    columns: dict[str, str] = Field(default={})
    """Map from a field (``instruction``, ``target``, ...) to its key in the metadata file, if their names differ."""
    crops: Count = Field(default=1, exclude_if=lambda crops: crops == 1)
    """Number of versions of each training row: its images as they are, and random crops of them with their aspect ratio and at
    least 0.4 of their width and height. With few photographs, a model then learns less about these photographs and more that
    carries over to others. Held-out images are not cropped. Not for instructions that name a position, such as "on the left"."""

    def rows(self, *, seed: int) -> ParsedRows:
        return read_folder(self.path, columns=self.columns, tag_keys=self.tags, thought_keys=self.thought_keys)

    def training_tasks(self, tasks: Tasks, train: Sequence[int], *, seed: int) -> Sequence[Task]:
        if self.crops == 1:
            return super().training_tasks(tasks, train, seed=seed)

        def load(index: int) -> Task:
            # The tasks of one crop number follow each other. The images of a task are cropped alike, but not its reference.
            number, place = divmod(index, len(train))
            if number == 0:
                return tasks[train[place]]
            row = tasks.rows[train[place]]
            task = load_task(row, resize=tasks.resize, crop=random_crop(seed, row.id, number).of)
            return replace(task, id=f"{task.id}#crop{number}")

        return LoadedTasks(len(train) * self.crops, load)

    @classmethod
    def rows_at(cls, path: Path) -> ParsedRows | None:
        return read_folder(path) if _misnamed(path) or any((path / name).is_file() for name in METADATA) else None


def _misnamed(folder: Path) -> str | None:
    """The only list of rows in a folder of images, if it is not called as ``METADATA``."""
    lists = [file.name for file in folder.glob("*") if file.suffix in (".jsonl", ".csv")]
    images = (file for pattern in ("*", "*/*") for file in folder.glob(pattern) if file.suffix.lower() in SUFFIXES)
    return lists[0] if len(lists) == 1 and lists[0] not in METADATA and any(images) else None


def read_folder(
    folder: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    tag_keys: tuple[str, ...] = (),
    thought_keys: tuple[str, ...] = (),
) -> ParsedRows:
    """The rows of a folder; no image is decoded yet.

    ``columns``: the key of a field, if it differs from the convention (``{"instruction": "edit_prompt"}``). ``tag_keys``: keys that
    become tags. ``thought_keys``: the keys to use of a chain of thought that is a map. Rows without an id get one that begins with
    the name of the folder.

    Raises ValueError for a missing folder, a missing or second metadata file, no rows, and unknown columns.
    """
    root = Path(folder)
    if root.name in METADATA and root.is_file():
        raise ValueError(f"{folder}: give the folder, not its metadata file: {root.parent}")
    if not root.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder of your data set (in a recipe: data.path)")
    there = [file for file in METADATA if (root / file).is_file()]
    if len(there) != 1:
        rename = "" if there or (name := _misnamed(root)) is None else f"; rename {name} to metadata{Path(name).suffix}"
        found_there = f"{' and '.join(there) or 'no metadata'} found"
        raise ValueError(f"{folder}: {found_there}; one of {' and '.join(METADATA)} must be there{rename}")
    table = read_metadata(path_under(root, there[0]))
    found, notes = find_columns(table.keys(), columns=columns or {}, defaults=_COLUMNS, file=table.file)
    require_instruction(found, table.keys(), file=table.file)
    if not {"image", "target", "chosen"} & found.keys():
        raise ValueError(
            f"{table.file}: no row has a file_name, a target or a chosen image; name the column of the images, columns={{'image': "
            "'...'}, or for prompts without images use data.kind: 'prompts'"
        )
    layout = Layout(table.file, root.resolve().name, found, tag_keys, partial(image_under, root), thought_keys)
    return table_rows(table, layout, notes=notes)


def image_under(root: Path, value: Any) -> EncodedImage:
    """The image that a metadata file names; its name in messages is its path under ``root``. Raises ValueError under the same
    conditions as ``path_under``."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"should be the name of a file, not {value!r:.40}")
    path = path_under(root, value)
    return EncodedImage(path.relative_to(root.resolve()).as_posix(), path)


def path_under(root: Path, name: str) -> Path:
    """The path of the file ``name`` under ``root``, with all links resolved.

    Raises ValueError for a missing file, and for a name that is absolute, contains "..", or leads out of the folder by a link.
    """
    if "\\" in name or "\0" in name:
        raise ValueError(f"{name!r}: separate folders by /, and use no other special characters in names")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} leaves the folder; name a file inside it, relative to the metadata file")
    try:
        path = (root / name).resolve(strict=True)
    except FileNotFoundError:
        raise ValueError(f"{name!r}: no such file") from None
    except (OSError, RuntimeError):  # a name that is too long, a file used as a folder, circular links
        raise ValueError(f"{name!r}: cannot be reached") from None
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"{name!r} leads out of the folder by a link; copy the file into it")
    if not path.is_file():
        raise ValueError(f"{name!r} is not a file")
    return path


class PromptData(StoredData):
    """A list of prompts without images: a text file with one prompt per line, a JSON lines file or a CSV file."""

    kind: Literal["prompts"] = "prompts"
    path: NonEmpty
    """The file. Lists that come with the package's recipes are found as ``recipes/...`` from any working directory."""
    columns: dict[str, str] = Field(default={}, exclude_if=operator.not_)
    """Map from a field (``instruction``, ``text``, ...) to its key in the file, if their names differ."""

    def rows(self, *, seed: int) -> MappedRows:
        return read_prompts(shipped(self.path), columns=self.columns, tag_keys=self.tags)

    @classmethod
    def rows_at(cls, path: Path) -> MappedRows | None:
        return read_prompts(path) if path.suffix in (".txt", ".jsonl", ".csv") else None

    def contents(self) -> TaskContents:
        return TaskContents(images=False, mask=False, reference=False, target=False, pairs=False)


def read_prompts(
    path: str | Path, *, columns: Mapping[str, str] | None = None, tag_keys: tuple[str, ...] = (), name: str | None = None
) -> MappedRows:
    """The rows of a prompt list. ``columns`` and ``tag_keys`` are as in ``read_folder``. ``name``: the prefix of the ids of rows
    without an id; by default the stem of the file name.

    Raises ValueError for a missing file, no rows, unknown columns, and the metadata file of a folder of images.
    """
    file = Path(path)
    table = read_metadata(file, text_field="prompt")
    named = (column for field in ("image", "target", "chosen") for column in _COLUMNS[field])
    if file.name in METADATA and not set(table.keys()).isdisjoint(named):
        raise ValueError(
            f"{file} names the images of a folder; give the folder, not its metadata file: {file.parent} (data.kind: 'folder')"
        )

    def no_image(value: Any) -> EncodedImage:
        raise ValueError(
            f"a prompt list has no images, but this row names {value!r:.40}; put the rows into a folder's metadata.jsonl"
        )

    found, notes = find_columns(table.keys(), columns=columns or {}, defaults=_PROMPT_COLUMNS, file=table.file)
    require_instruction(found, table.keys(), file=table.file)
    return prompt_rows(table_rows(table, Layout(table.file, name or file.stem, found, tag_keys, no_image), notes=notes))


def read_instructions(path: str | Path) -> Subset:
    """The tasks of a list for inference, in the order of the list.

    A JSON line has ``instruction`` (or ``prompt``) and may have ``image`` (or ``file_name``; one or a list), ``mask`` and
    ``reference``: file names relative to the list; no file outside the folder of the list is opened. If one line has images, all
    lines must have images. Raises ValueError with the file and line of the rows that cannot be used.
    """
    file = Path(path)
    table = read_metadata(file, text_field="instruction")
    columns, notes = find_columns(table.keys(), columns={}, defaults=_INSTRUCTION_COLUMNS, file=table.file)
    layout = Layout(table.file, file.stem, columns, (), partial(image_under, file.parent))
    rows = table_rows(table, layout, notes=notes)
    return Subset(Tasks(rows, resize=None), accept_rows(rows, on_bad_row="refuse").indices)
