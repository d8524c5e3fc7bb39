"""Rows of a data set, checked field by field, with their images still encoded.

The fields of a row are ``id``, ``instruction``, ``image`` (one or a list), ``mask``, ``reference``, ``target``, ``chosen`` and
``rejected`` (a pair of results of which people preferred the first), ``text`` (the text that the image should show), ``source``
(all rows of one source are on the same side of a split), ``thought`` (the chain of thought before the edited image, which goes to
``meta``) and ``later`` (the instructions of the further turns of an episode, which also go to ``meta``). A column map says which
column of the data set contains each field: ``{"instruction": "edit_prompt", "image": "source_image"}``. A dotted name refers to a
part of a nested value: ``"edit.compound.2.compound_instruction"``. All other columns with JSON values go to ``meta``.

``quoted`` finds the quoted text of a prompt: the text that the image should show, for rewards that read text in images.
"""

import dataclasses
import difflib
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from retouch.config.imports import nearest
from retouch.data.images import EncodedImage
from retouch.types import Codes, Json

FIELDS = ("id", "instruction", "image", "mask", "reference", "target", "chosen", "rejected", "text", "source", "thought", "later")
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

    @property
    def turns(self) -> int:
        """The number of instructions of an episode, with that of the first turn; 0 without ``later``."""
        later = self.meta.get("later")
        return 1 + len(later) if _are_texts(later) else 0


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(each, str) and each.strip() for each in values)


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
        instruction = values.get("instruction")  # or a list of phrasings, or TRL's list of messages
        if isinstance(instruction, list) and instruction:
            first = instruction[0]
            instruction = self._of_messages(instruction, wrong) if isinstance(first, Mapping) and "role" in first else first
        if not isinstance(instruction, str) or not instruction.strip():
            reason = f"the instruction should be text, not {instruction!r:.40}"
            if instruction is None:
                reason = f"no instruction; the row has {', '.join(fields) or 'nothing'}"
            elif isinstance(instruction, str | list):
                reason = "the instruction is empty"
            wrong.append(f"{self.columns.get('instruction', 'instruction')!r}: {reason}")
        images = self._images(values["image"], wrong) if "image" in self.columns else ()
        mask, reference, target = (self._image(field, values.get(field), wrong) for field in ("mask", "reference", "target"))
        chosen, rejected = (self._image(field, values.get(field), wrong) for field in ("chosen", "rejected"))
        if (values.get("chosen") is None) != (values.get("rejected") is None):
            there, missing = ("chosen", "rejected") if values.get("rejected") is None else ("rejected", "chosen")
            wrong.append(f"a {there} image without a {missing} one; a pair needs both")
        names = {field: self._name(field, values.get(field), wrong) for field in ("id", "text", "source")}
        tags = {key: self._name(key, nested_value(fields, key), wrong) for key in self.tag_keys}
        wrong += [f"{key!r}: no value for this tag" for key, value in tags.items() if value is None]
        thought, later = None, values.get("later")
        try:
            thought = thought_of(values.get("thought"), keys=self.thought_keys)
        except ValueError as error:
            wrong.append(f"{self.columns['thought']!r}: {error}")
        if later is not None and not _are_texts(later):
            wrong.append(f"{self.columns['later']!r}: should be a list of texts, the instructions of the further turns")
        if wrong:
            raise InvalidRow([Problem(self.file, line, what) for what in wrong])
        instruction = content = str(instruction)
        if images:
            data = images[0].data
            content = images[0].name if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
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
            source=names["source"] or content,
            tags={key: value for key, value in tags.items() if value is not None},
            meta={
                **{key: value for key, value in fields.items() if key not in self.columns.values() and is_json(value)},
                **({} if thought is None else {Codes.THOUGHT: thought}),
                **({} if later is None else {"later": later}),
            },
            chosen=chosen,
            rejected=rejected,
        )

    def _of_messages(self, messages: Sequence[Any], wrong: list[str]) -> Any:
        """The text of a conversation that is one message of the user; adds an error for any other."""
        key, roles = self.columns["instruction"], [str(each.get("role")) for each in messages if isinstance(each, Mapping)]
        if roles != ["user"] or len(messages) > 1:
            wrong.append(
                f"{key!r}: a conversation with the messages {', '.join(roles)}; give one message of the user, or its text. A "
                "system prompt is set once, as policy.model.system of the recipe (retouch.models.QwenLanguage(..., system='...'))"
            )
            return "-"
        content = messages[0].get("content")
        if not isinstance(content, list):
            return content
        parts = [{name: value for name, value in part.items() if value is not None} for part in content]
        if any(part.get("type") not in ("text", "image") or part.keys() - {"type", "text"} for part in parts):
            wrong.append(
                f"{key!r}: a message may have text and the mark {{'type': 'image'}}; put the image into the column 'image'"
            )
        return "".join(str(part.get("text", "")) for part in parts)

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


class ParsedRows:
    """Rows that a layout parses. ``fields``: the line and the fields of the row with a number; it raises InvalidRow for a line that
    cannot be read. ``identity``: identifies them; None for rows whose check is not stored."""

    def __init__(
        self,
        layout: Layout,
        count: int,
        fields: Callable[[int], tuple[int, Mapping[str, Any]]],
        *,
        problems: Sequence[Problem],
        identity: Callable[[], Identity] | None,
    ) -> None:
        self.problems = tuple(problems)
        self._layout, self._count = layout, count
        self._fields, self._identity = fields, identity

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        line, fields = self._fields(range(self._count)[index])
        return self._layout.parse(fields, line=line)

    def identity(self) -> Identity | None:
        """The identity of the rows, if they can have images."""
        images = self._layout.columns.keys() & {"image", "mask", "reference", "target", "chosen", "rejected"}
        return None if self._identity is None or not images else self._identity()


class MappedRows:
    """The given rows, each changed by ``change``, which may raise InvalidRow. ``mark``: a letter for the digest of the rows'
    identity; None for rows whose check is not stored."""

    def __init__(self, rows: Rows, change: Callable[[Row], Row], *, mark: str | None = None) -> None:
        self.problems = rows.problems
        self._rows, self._change, self._mark = rows, change, mark

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._change(self._rows[index])

    def identity(self) -> Identity | None:
        """The identity of the given rows, with a changed digest."""
        found = self._rows.identity() if self._mark and hasattr(self._rows, "identity") else None
        return None if found is None else dataclasses.replace(found, digest=f"{self._mark}{found.digest[1:]}")


def prompt_rows(rows: Rows) -> MappedRows:
    """The given rows, each as ``with_quoted_text``."""
    return MappedRows(rows, with_quoted_text, mark="p")


def with_quoted_text(row: Row) -> Row:
    """The row; without ``text`` it gets the quoted text of its prompt (``quoted``)."""
    return row if row.text is not None else dataclasses.replace(row, text=quoted(row.instruction))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequirements:
    """What every row must have. ``images``: the smallest and the largest number of source images. ``mask``, ``reference``,
    ``text``, ``target``: whether every row must have one. ``pairs``: whether every row must have a chosen and a rejected image.
    ``turns``: the smallest and the largest number of turns; a row without ``later`` has none.

    ``model`` and ``takes`` are used in the error message: "flux-fill takes one image and a mask".
    """

    images: tuple[int, int] = (0, sys.maxsize)
    mask: bool = False
    reference: bool = False
    text: bool = False
    target: bool = False
    pairs: bool = False
    turns: tuple[int, int] = (0, sys.maxsize)
    model: str = "the model"
    takes: str = "any number of images"

    def lacking(self, images: int, *, mask: bool, reference: bool, text: bool, target: bool, pair: bool, turns: int) -> list[str]:
        """What a row lacks that has this number of source images, and these parts."""
        wanted = f"{self.model} takes {self.takes}, and this row has"
        wrong = []
        if not self.images[0] <= images <= self.images[1]:
            own = "" if images else "; it is in `image`, or in the column of data.columns.image"
            wrong.append(f"{wanted} {images} image{'s' * (images != 1)}{own}")
        if self.mask and not mask:
            wrong.append(f"{wanted} no mask")
        if self.reference and not reference:
            wrong.append("an IP-Adapter reads a reference image, and this row has none")
        if self.text and not text:
            wrong.append("no text for the reward to look for; put it in quotation marks in the prompt, or in a column `text`")
        if self.target and not target:
            wrong.append("no target image for the reward to compare with; add a column `target`, or use another reward")
        if self.pairs and not pair:
            wrong.append("no chosen and rejected image; DPO on the pairs of the data needs both in every row")
        if self.turns[0] > turns:
            wrong.append("no turns; list the instructions of the further turns in a column `later`, or remove rollout.turns")
        if self.turns[1] < turns:
            wrong.append(f"{turns} turns, and rollout.turns.most is {self.turns[1]}; raise it (at most 4), or shorten `later`")
        return wrong

    def checked(self, row: Row) -> Row:
        """The row. Raises InvalidRow if it does not meet the requirements."""
        wrong = self.lacking(
            len(row.images),
            mask=row.mask is not None,
            reference=row.reference is not None,
            text=bool((row.text or "").strip()),
            target=row.target is not None,
            pair=row.chosen is not None and row.rejected is not None,
            turns=row.turns,
        )
        if wrong:
            raise InvalidRow([Problem(row.file, row.line, what) for what in wrong])
        return row


def find_columns(
    keys: Sequence[str], *, columns: Mapping[str, str], defaults: Mapping[str, Sequence[str]], file: str
) -> tuple[dict[str, str], list[Problem]]:
    """The column of each field, and notes on keys that look mistyped.

    ``keys``: the columns of the data set. ``columns``: the column of a field, given by the user; it takes precedence over
    ``defaults``, the possible names of each field. Raises ValueError for an unknown field, for a column in ``columns`` that the
    data set lacks, and for two columns that could be the same field.
    """
    for field, column in columns.items():
        if field not in FIELDS:
            near = nearest(field, FIELDS)
            meant = f"; {near!r} is" if near else ""
            raise ValueError(f"columns: {field!r} is not a field{meant}. The fields are {', '.join(FIELDS)}")
        if column not in keys and column.partition(".")[0] not in keys:
            raise ValueError(f"columns: {field!r} should be read from {column!r}, but {file} has only {', '.join(keys)}")
    found = dict(columns)
    for field, names in defaults.items():
        there = [name for name in names if name in keys and name not in found.values()]
        if field not in columns and len(there) > 1:
            raise ValueError(f"{file}: both {there[0]!r} and {there[1]!r} could be the field {field!r}; say which in columns")
        if field not in columns and there:
            found[field] = there[0]
    known = [name for field, names in defaults.items() if field not in found for name in names]
    notes = []
    for key in keys:
        if key in found.values():
            continue
        same = [name for name in known if name.lower() == key.lower()]
        near = next(iter(same or difflib.get_close_matches(key, known, n=1, cutoff=0.85)), None)
        if near is not None:
            kept = f"is read as an ordinary column, not as {near!r}, and " if same else ""
            notes.append(Problem(file, 0, f"the key {key!r} {kept}goes to meta; should it be {near!r}?", "note"))
    return found, notes


def require_instruction(found: Mapping[str, str], keys: Sequence[str], *, file: str) -> None:
    """Raise ValueError if the columns ``keys`` of a data set have none for the field ``instruction``."""
    if keys and "instruction" not in found:
        likely = next((key for word in ("instruction", "prompt", "caption") for key in keys if word in key.lower()), "...")
        raise ValueError(
            f"{file}: no column with the prompts; it has {', '.join(keys)}. Call it `prompt` or `instruction`, or name it: "
            f"columns={{'instruction': '{likely}'}}, in a recipe --set data.columns.instruction={likely}"
        )


_DOUBLE, _SINGLE = '"＂“”„‟', "'‘’‚‛"
_BRACKETS = {"«": "»", "»": "«", "‹": "›", "›": "‹", "「": "」", "『": "』", "｢": "｣", "〝": "〞〟"}
_ELIDED = re.compile(r"\d\ds?\b|(?:n|em|til|tis|twas|cause|bout|round)\b", re.IGNORECASE)  # 'n', '90s


@dataclass(frozen=True, slots=True)
class _Mark:
    """A quotation mark, or what looks like one. ``at``: its place. ``opens``, ``closes``: whether a quotation can begin or end
    here. ``weak``: whether it is an inch mark, a feet mark or an apostrophe, unless it ends a quotation."""

    at: int
    opens: bool
    closes: bool
    weak: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """The first quotation of one kind. ``end``: the place of its closing mark; None if it has none, or if it is not certain."""

    start: int
    end: int | None
    straight_single: bool = False


def quoted(prompt: str) -> str | None:
    """The text of the first quotation in a prompt, in quotation marks of any kind; None if there is none, if it is empty, or if it
    is not certain where it ends.

    A mark after a digit is an inch mark or a feet mark (``5" x 7"``), unless it ends a quotation (``"ROUTE 66"``).
    """
    text = re.sub(r"''|``", '"', prompt)
    text = re.sub(r'\\(?=")|(?<!\d)"(?=")', "", text)  # \"...\" and ""..."", as files with escaped quotation marks have them
    kinds = (_first_in_brackets(text), _first_of(text, _DOUBLE), _first_of(text, _SINGLE))
    found = sorted((kind for kind in kinds if kind is not None), key=lambda kind: kind.start)
    if not found or found[0].end is None:
        return None
    first, end = found[0], found[0].end
    for other in found[1:]:
        inside = first.start < other.start < end
        if inside and (first.straight_single or (other.end is None and not other.straight_single) or (other.end or 0) > end):
            return None
    return text[first.start + 1 : end].strip() or None


def _first_in_brackets(text: str) -> _Found | None:
    """The first quotation in marks of two shapes; quotations of the same kind in it are part of it."""
    places = [(place, left) for left in _BRACKETS if (place := text.find(left)) >= 0]
    if not places:
        return None
    start, left = min(places)
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == left) - (text[place] in _BRACKETS[left])
        if depth == 0:
            return _Found(start, place)
    return _Found(start, None)


def _first_of(text: str, family: str) -> _Found | None:
    """The first quotation in the marks of a family, whose opening and closing marks may look alike."""
    single = family is _SINGLE
    marks = [mark for place, sign in enumerate(text) if sign in family and (mark := _mark(text, place, single=single))]
    opening: _Mark | None = None
    for number, mark in enumerate(marks):
        if opening is None:
            if mark.opens:
                opening = mark
            elif mark.closes and not mark.weak and not single:
                return _Found(mark.at, None)  # the end of a quotation without a beginning
        elif mark.closes:
            after = marks[number + 1] if number + 1 < len(marks) else None
            stray = after is not None and after.closes and not after.opens and (mark.weak or not after.weak)
            straight = single and text[opening.at] == "'"
            return _Found(opening.at, None if stray else mark.at, straight)
        elif single:
            opening = mark  # the mark before was an apostrophe
        else:
            return _Found(opening.at, None)
    return None if opening is None or single else _Found(opening.at, None)


def _mark(text: str, place: int, *, single: bool) -> _Mark | None:
    """The mark at a place; None if no quotation can begin or end there."""
    before, after = text[place - 1 : place], text[place + 1 : place + 2]
    spaced = not single and not before.strip() and not after.strip()
    opens = (bool(after.strip()) or spaced) and not _in_word(before) and not (single and _ELIDED.match(text, place + 1))
    closes = (bool(before.strip()) or spaced) and not _in_word(after)
    weak = closes and ((_in_word(before) and before.isnumeric()) or (single and before in "sS"))
    return _Mark(place, opens, closes, weak) if opens or closes else None


def _in_word(sign: str) -> bool:
    """Whether a character is a letter or digit of a script that separates words by spaces."""
    return sign.isalnum() and sign < "\u2e80"
