"""Rows of a data set, checked field by field, with their images still encoded.

The fields of a row are ``id``, ``instruction``, ``image`` (one or a list), ``mask``, ``reference``, ``target``, ``chosen`` and
``rejected`` (a pair of results of which people preferred the first), ``text`` (the text that the image should show), ``source``
(all rows of one source are on the same side of a split) and ``thought`` (the chain of thought before the edited image, which goes
to ``meta``). A column map says which column of the data set contains each field:
``{"instruction": "edit_prompt", "image": "source_image"}``. A dotted name refers to a part of a nested value:
``"edit.compound.2.compound_instruction"``. All other columns with JSON values go to ``meta``.
"""

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from retouch.data.images import EncodedImage
from retouch.types import Codes, Json

FIELDS = ("id", "instruction", "image", "mask", "reference", "target", "chosen", "rejected", "text", "source", "thought")
_ENDS = 65536
LONGEST_THOUGHT = 1750
"""The largest number of characters of a chain of thought; longer ones are truncated (EARL)."""
ToImage = Callable[[Any], EncodedImage]


@dataclass(frozen=True, slots=True)
class Problem:
    """An error or a note about a data set.

    ``file``: the metadata file (or the id of the data set). ``line``: counted from 1; 0 means the whole file. An ``error`` makes
    the row unusable. A ``note`` says how the row is read.
    """

    file: str
    line: int
    what: str
    severity: Literal["error", "note"] = "error"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.severity}: {self.what}"


class InvalidRow(ValueError):
    """A row that cannot become a task. ``problems``: all of its errors."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Row:
    """A task whose images are not decoded yet. ``source``: all rows of one source are on the same side of a split; if it is empty,
    the row shares its source with no other row.

    Raises ValueError for an image that is not an ``EncodedImage``, such as a PIL image.
    """

    file: str
    line: int
    id: str
    instruction: str
    images: tuple[EncodedImage, ...] = ()
    mask: EncodedImage | None = None
    reference: EncodedImage | None = None
    target: EncodedImage | None = None
    text: str | None = None
    source: str = ""
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    chosen: EncodedImage | None = None
    rejected: EncodedImage | None = None

    def __post_init__(self) -> None:
        for image in (*self.images, self.mask, self.reference, self.target, self.chosen, self.rejected):
            if image is not None and not isinstance(image, EncodedImage):
                raise ValueError(
                    f"an image of the row {self.id!r} is of type {type(image).__name__}; give the path or the bytes of its file, "
                    "as retouch.data.images.EncodedImage(name, data)"
                )


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies the rows of a data set, so that the result of a check can be stored for them.

    ``digest``: a digest of the row list and of how its columns are read, without the contents of the image files. ``file``: the
    name of the data set in messages, the same for all rows. ``folder``: the folder of the data set; None if it is not on a disk.
    """

    digest: str
    file: str
    folder: Path | None = None


@runtime_checkable
class Rows(Protocol):
    """A data set, row by row. ``problems``: about the data set as a whole. Indexing raises InvalidRow for an unusable row.

    Rows may have a method ``identity``; if it returns an ``Identity``, the result of checking the rows is stored.
    """

    problems: tuple[Problem, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a data set are read. ``columns``: the column of each field. ``name``: the prefix of the ids that rows without
    an id get. ``tag_keys``: the columns that become tags. ``thought_keys``: the keys to use of a chain of thought that is a map;
    all keys if it is empty."""

    file: str
    name: str
    columns: Mapping[str, str]
    tag_keys: tuple[str, ...]
    to_image: ToImage
    thought_keys: tuple[str, ...] = ()

    @property
    def has_images(self) -> bool:
        """Whether rows can have images."""
        return not self.columns.keys().isdisjoint(("image", "mask", "reference", "target", "chosen", "rejected"))

    def digest(self, *content: bytes | str) -> str:
        """A hash of the ``content`` of the row list and of how this layout reads it."""
        found = hashlib.sha256(json.dumps([self.name, sorted(self.columns.items()), self.tag_keys, self.thought_keys]).encode())
        for part in content:
            found.update(b"\0" + (part.encode() if isinstance(part, str) else part))
        return found.hexdigest()

    def parse(self, fields: Mapping[str, Any], *, line: int) -> Row:
        """Make a row from the fields of a line. Raises InvalidRow with all errors of the row."""
        wrong: list[str] = []
        values = {field: nested_value(fields, column) for field, column in self.columns.items()}
        instruction = _first_phrasing(values.get("instruction"))
        if instruction is None:
            wrong.append(f"{self.columns.get('instruction', 'instruction')!r}: {_no_phrasing(values.get('instruction'), fields)}")
        images = self._images(values["image"], wrong) if "image" in self.columns else ()
        mask, reference, target = (self._image(field, values.get(field), wrong) for field in ("mask", "reference", "target"))
        chosen, rejected = (self._image(field, values.get(field), wrong) for field in ("chosen", "rejected"))
        if (values.get("chosen") is None) != (values.get("rejected") is None):
            there, missing = ("chosen", "rejected") if values.get("rejected") is None else ("rejected", "chosen")
            wrong.append(f"a {there} image without a {missing} one; a pair needs both")
        names = {field: self._name(field, values.get(field), wrong) for field in ("id", "text", "source")}
        tags = {key: self._name(key, nested_value(fields, key), wrong) for key in self.tag_keys}
        wrong += [f"{key!r}: no value for this tag" for key, value in tags.items() if value is None]
        thought = self._thought(values.get("thought"), wrong)
        if wrong or instruction is None:
            raise InvalidRow([Problem(self.file, line, what) for what in wrong])
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
            source=names["source"] or (_content_key(images[0]) if images else instruction),
            tags={key: value for key, value in tags.items() if value is not None},
            meta={
                **{key: value for key, value in fields.items() if key not in self.columns.values() and is_json(value)},
                **({} if thought is None else {Codes.THOUGHT: thought}),
            },
            chosen=chosen,
            rejected=rejected,
        )

    def _images(self, value: Any, wrong: list[str]) -> tuple[EncodedImage, ...]:
        values = value if isinstance(value, list | tuple) else [value]
        if not values or any(one is None for one in values):  # `in` would compare arrays element by element
            wrong.append(f"{self.columns['image']!r}: no source image")
            return ()
        return tuple(image for one in values if (image := self._image("image", one, wrong)) is not None)

    def _image(self, field: str, value: Any, wrong: list[str]) -> EncodedImage | None:
        if value is None:
            return None
        try:
            return self.to_image(value)
        except ValueError as error:
            wrong.append(f"{self.columns[field]!r}: {error}")
            return None

    def _thought(self, value: Any, wrong: list[str]) -> str | None:
        try:
            return thought_of(value, keys=self.thought_keys)
        except ValueError as error:
            wrong.append(f"{self.columns['thought']!r}: {error}")
            return None

    def _name(self, field: str, value: Any, wrong: list[str]) -> str | None:
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value)
        if value is not None:
            wrong.append(f"{self.columns.get(field, field)!r}: should be text or a whole number, not {value!r:.40}")
        return None


def thought_of(value: Json, *, keys: Sequence[str] = ()) -> str | None:
    """A chain of thought as text of at most ``LONGEST_THOUGHT`` characters; None for an empty one.

    ``value``: text, or a map (with ``keys`` also as JSON text). Without ``keys``, the text has the values of the map in order, one
    per line; with ``keys``, it has a line "key: value" for each key, like EARL's ``--CoT-keys``. Raises ValueError for any other
    value, and for a map that lacks one of ``keys``.
    """
    if keys and isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"should be a map with {', '.join(keys)}, and is not JSON") from None
    if isinstance(value, Mapping):
        if lacking := [key for key in keys if key not in value]:
            raise ValueError(f"has no {lacking[0]!r}, which thought_keys names; it has {', '.join(map(str, value))}")
        lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in value.values()]
        if keys:
            chosen = dict(zip(value, lines, strict=True))
            lines = [f"{key}: {chosen[key]}" for key in keys]
        value = "\n".join(lines)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"should be text or a map of texts, not {value!r:.40}")
    return value[:LONGEST_THOUGHT] if value is not None and value.strip() else None


def nested_value(fields: Mapping[str, Any], column: str) -> Any:
    """The value under a name, or under a dotted path of names and list indices; None if there is no value."""
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
    """The source of each of these rows, for ``split_by_source``. Raises InvalidRow for an unusable row."""
    read = (rows[index] for index in indices)
    return [row.source or row.id for row in read]


class PromptRows:
    """The given rows; a row without ``text`` gets the quoted text of its prompt (``quoted``)."""

    def __init__(self, rows: Rows) -> None:
        self.problems = rows.problems
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        from retouch.data.quotes import quoted

        row = self._rows[index]
        return row if row.text is not None else dataclasses.replace(row, text=quoted(row.instruction))

    def identity(self) -> Identity | None:
        """The identity of the given rows, with a changed digest, because their texts are read differently."""
        found = self._rows.identity() if hasattr(self._rows, "identity") else None
        return None if found is None else dataclasses.replace(found, digest=f"p{found.digest[1:]}")


def _first_phrasing(value: Any) -> str | None:
    """The instruction, or the first of a list of phrasings; None if it is missing or empty."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) and first.strip() else None


def _no_phrasing(value: Any, fields: Mapping[str, Any]) -> str:
    """Return the reason why a value is not an instruction."""
    first = value[0] if isinstance(value, list) and value else value
    if first is None:
        return f"no instruction; the row has {', '.join(fields) or 'nothing'}"
    empty = isinstance(first, str | list)
    return "the instruction is empty" if empty else f"the instruction should be text, not {first!r:.40}"


def _content_key(image: EncodedImage) -> str:
    """A hash of the bytes of the image if they are in memory, else the name of its file."""
    return image.name if isinstance(image.data, Path) else hashlib.sha256(image.data).hexdigest()


def image_keys(row: Row) -> tuple[str, ...]:
    """Keys of the images of a row except its mask: equal images have equal keys, whatever their files are called. An image is known
    by the size, the beginning and the end of its file; an image of codes, by its codes."""
    others = (row.target, row.reference, row.chosen, row.rejected)
    found = [_bytes_key(image.data) for image in (*row.images, *others) if image is not None]
    found += [content_key(json.dumps(row.meta[codes]).encode()) for codes in (Codes.SOURCE, Codes.TARGET) if codes in row.meta]
    return tuple(dict.fromkeys(key for key in found if key))


def split_keys(row: Row) -> tuple[str, ...]:
    """The source of a row, and the keys of its images. Rows that have one in common are on one side of a split."""
    return row.source, *image_keys(row)


def content_key(*content: bytes) -> str:
    """A short key of a content; unequal contents have the same key by chance of 1 in 2^64."""
    return hashlib.sha256(b"".join(content)).hexdigest()[:16]


def _bytes_key(data: Path | bytes) -> str:
    """The key of the content of an image file; empty if it cannot be read."""
    if isinstance(data, Path) and not data.is_file():
        return ""
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            start = file.read(_ENDS)
            file.seek(max(0, size - _ENDS))
            return content_key(str(size).encode(), start, file.read(_ENDS))
    except OSError:
        return ""


def is_json(value: Any) -> bool:
    """Whether a value can be stored as JSON and read again without a change."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(is_json(inner) for inner in value)
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
