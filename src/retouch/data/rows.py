"""Rows of a data set, checked field by field, with their pictures still encoded.

The fields of a row are ``id``, ``instruction``, ``image`` (one or a list), ``mask``, ``reference``, ``target``, ``text`` (what
is to be written in the picture) and ``source`` (what a split keeps together). A column map says under which names a data set
has them: ``{"instruction": "edit_prompt", "image": "source_image"}``. A dotted name reaches inside:
``"edit.compound.2.compound_instruction"``. What else a row has becomes its ``meta`` where it is JSON.
"""

import difflib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from retouch.data.images import Picture
from retouch.data.problems import BadRow, Problem
from retouch.data.sources.tables import Table
from retouch.types import Json

FIELDS = ("id", "instruction", "image", "mask", "reference", "target", "text", "source")
ToPicture = Callable[[Any], Picture]


@dataclass(frozen=True, slots=True)
class Row:
    """A task whose pictures are not loaded yet. ``source``: rows of one source belong on the same side of a split."""

    file: str
    line: int
    id: str
    instruction: str
    images: tuple[Picture, ...]
    mask: Picture | None
    reference: Picture | None
    target: Picture | None
    text: str | None
    source: str
    tags: Mapping[str, str]
    meta: Mapping[str, Json]


@runtime_checkable
class Rows(Protocol):
    """A data set row by row. ``problems``: what is to be said of it as a whole. Indexing raises BadRow for an unusable row."""

    problems: tuple[Problem, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How a data set's rows are read. ``columns``: field to column, complete; ``name`` begins the ids of rows that have none."""

    file: str
    name: str
    columns: Mapping[str, str]
    tag_keys: tuple[str, ...]
    to_picture: ToPicture

    def parse(self, fields: Mapping[str, Any], *, line: int) -> Row:
        """The row that these fields make. BadRow with everything that is wrong."""
        wrong: list[str] = []
        values = {field: dig(fields, column) for field, column in self.columns.items()}
        instruction = _phrasing(values.get("instruction"))
        if instruction is None:
            wrong.append(
                f"{self.columns.get('instruction', 'instruction')!r}: no instruction; the row has {', '.join(fields) or 'nothing'}"
            )
        images = self._images(values["image"], wrong) if "image" in self.columns else ()
        mask, reference, target = (self._picture(field, values.get(field), wrong) for field in ("mask", "reference", "target"))
        names = {field: self._name(field, values.get(field), wrong) for field in ("id", "text", "source")}
        tags = {key: self._name(key, dig(fields, key), wrong) for key in self.tag_keys}
        wrong += [f"{key!r}: no value for this tag" for key, value in tags.items() if value is None]
        if wrong or instruction is None:
            raise BadRow([Problem(self.file, line, what) for what in wrong])
        return Row(
            file=self.file,
            line=line,
            id=names["id"] or f"{self.name}/{line}",
            instruction=instruction,
            images=images,
            mask=mask,
            reference=reference,
            target=target,
            text=names["text"],
            source=names["source"] or (_key(images[0]) if images else instruction),
            tags={key: value for key, value in tags.items() if value is not None},
            meta={key: value for key, value in fields.items() if key not in self.columns.values() and _is_json(value)},
        )

    def _images(self, value: Any, wrong: list[str]) -> tuple[Picture, ...]:
        many = value if isinstance(value, list) else [value]
        if not many or None in many:
            wrong.append(f"{self.columns['image']!r}: no source picture")
            return ()
        return tuple(picture for one in many if (picture := self._picture("image", one, wrong)) is not None)

    def _picture(self, field: str, value: Any, wrong: list[str]) -> Picture | None:
        if value is None:
            return None
        try:
            return self.to_picture(value)
        except ValueError as error:
            wrong.append(f"{self.columns[field]!r}: {error}")
            return None

    def _name(self, field: str, value: Any, wrong: list[str]) -> str | None:
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value)
        if value is not None:
            wrong.append(f"{self.columns.get(field, field)!r}: a text or a whole number belongs here, not {value!r:.40}")
        return None


class TableRows:
    """The rows of a metadata file."""

    def __init__(self, table: Table, layout: Layout, *, notes: Sequence[Problem] = ()) -> None:
        self.problems = (*table.notes, *notes)
        self._entries = table.entries
        self._layout = layout

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        entry = self._entries[index]
        if entry.fields is None:
            raise BadRow([Problem(self._layout.file, entry.line, entry.what)])
        return self._layout.parse(entry.fields, line=entry.line)


class JoinedRows:
    """The rows of several data sets, one after another. Give the parts different names, so that their ids differ."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.problems = tuple(problem for part in parts for problem in part.problems)
        self._places = [(part, index) for part in parts for index in range(len(part))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Row:
        part, within = self._places[index]
        return part[within]


def find_columns(
    keys: Sequence[str], *, columns: Mapping[str, str], defaults: Mapping[str, Sequence[str]], file: str
) -> tuple[dict[str, str], list[Problem]]:
    """Each field's column: the one that ``columns`` names, else the default that is there. And notes on keys that look mistyped.

    ValueError: a field that there is none of, a named column that the data set lacks, two columns for one field.
    """
    for field, column in columns.items():
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            raise ValueError(
                f"columns: {field!r} is no field{f'; {near[0]!r} is' if near else ''}. The fields are {', '.join(FIELDS)}"
            )
        if column not in keys and column.partition(".")[0] not in keys:
            raise ValueError(f"columns: {field!r} is to be read from {column!r}, but {file} has only {', '.join(keys)}")
    found = dict(columns)
    for field, names in defaults.items():
        there = [name for name in names if name in keys and name not in found.values()]
        if field not in columns and len(there) > 1:
            raise ValueError(f"{file}: both {there[0]!r} and {there[1]!r} could be the field {field!r}; say which in columns")
        if field not in columns and there:
            found[field] = there[0]
    known = [name for field, names in defaults.items() if field not in found for name in names]
    notes = [
        Problem(file, 0, f"the key {key!r} goes to meta; should it be {near[0]!r}?", "note")
        for key in keys
        if key not in found.values() and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.85))
    ]
    return found, notes


def dig(fields: Mapping[str, Any], column: str) -> Any:
    """The value under a name, or under a dotted path of names and list indices. None where there is none."""
    if column in fields:
        return fields[column]
    value: Any = fields
    for part in column.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def sources(rows: Rows, indices: Sequence[int]) -> list[str]:
    """Each of these rows' source, for ``split_by_source``. BadRow for an unusable one."""
    return [rows[index].source for index in indices]


def _phrasing(value: Any) -> str | None:
    """The instruction; of a list of phrasings the first."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) and first.strip() else None


def _key(picture: Picture) -> str:
    """Names a picture's contents where they are at hand, else its place in the data set."""
    return picture.name if isinstance(picture.data, Path) else hashlib.sha256(picture.data).hexdigest()


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_is_json(inner) for inner in value)
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
