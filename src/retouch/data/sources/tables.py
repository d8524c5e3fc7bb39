"""Reads metadata files line by line: JSON lines, CSV, and plain text with one prompt per line.

Files are UTF-8. A byte-order mark and CRLF are accepted and noted. Blank lines are skipped. An unreadable line stays in the table
as an entry with the reason, so that all bad lines are reported together.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retouch.config.consent import data_path
from retouch.data.rows import Identity, InvalidRow, Layout, Problem, Row
from retouch.records.shapes import strict_json
from retouch.types import Json

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


class TableRows:
    """The rows of a metadata file."""

    def __init__(self, table: Table, layout: Layout, *, notes: Sequence[Problem] = ()) -> None:
        self.problems = (*table.notes, *notes)
        self._entries = table.entries
        self._layout = layout
        self._digest = table.digest

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        entry = self._entries[index]
        if entry.fields is None:
            raise InvalidRow([Problem(self._layout.file, entry.line, entry.what)])
        return self._layout.parse(entry.fields, line=entry.line)

    def identity(self) -> Identity | None:
        """The identity of the file, if its rows can have images; the result of the check is stored in the folder of the file."""
        if not self._layout.has_images:
            return None
        return Identity(self._layout.digest(self._digest), self._layout.file, Path(self._layout.file).parent)


def read_table(path: Path, *, text_field: str = "text") -> Table:
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
    if path.suffix == ".csv":
        entries = tuple(_csv_entries(data, file))
    else:
        entries = tuple(_line_entries(data, None if path.suffix == ".jsonl" else text_field))
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
        elif text:
            yield _json_entry(number, text)


def _json_entry(number: int, text: str) -> Entry:
    try:
        fields = strict_json(text)
        json.dumps(fields, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair cannot be encoded
    except json.JSONDecodeError as error:
        return Entry(number, None, f"not JSON: {error.msg} at column {error.colno}")
    except UnicodeEncodeError:
        return Entry(number, None, "not JSON: half of a surrogate pair in a string")
    except ValueError as error:
        return Entry(number, None, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return Entry(number, None, f"should be a JSON object, not {type(fields).__name__}")
    return Entry(number, fields)


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
