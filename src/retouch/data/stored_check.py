"""The result of checking a data set, which is stored for later starts.

It is one JSON file in the folder ``.retouch`` of the data set, or in the user's cache folder if the former is not writable. The
file name contains a digest of the row list and of how its columns are read, so a changed list is checked again. Image files are
compared by size and modification time, and rows whose files have changed are examined again. A result that cannot be read is
ignored.
"""

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retouch.config.consent import user_folder
from retouch.data.examination import FileState, Region, RowReport, examine_all, file_state
from retouch.data.images import MAX_PIXELS, Resize, kept_by_fit, removed_by_fit
from retouch.data.requirements import CheckedShare, RowRequirements
from retouch.data.rows import Identity, Problem, Rows
from retouch.data.split import limit
from retouch.records import files

FOLDER = ".retouch"
FIRST = 64
"""Number of rows whose images ``check="first"`` decodes."""
_KEPT = 0.5
"""The share of an image that a crop keeps without a note."""
_VERSION = 3
# The bits of a row's flags. The bits above them contain the number of its source images.
_READABLE, _DECODED, _MASK, _REFERENCE, _TEXT, _TARGET, _PAIR, _IMAGES = 1, 2, 4, 8, 16, 32, 64, 128

_log = logging.getLogger("retouch")


@dataclass
class CheckedRows:
    """What is known about the rows of a data set, column by column; entry i belongs to row i.

    ``flags``: what a row has, as bits. ``ids``, ``lines``, ``sources``, ``names`` (of the metadata file) and ``contents``
    (``row_content``): set for readable rows. ``problems`` (without those of repeated ids), ``files``, ``keys`` and ``regions``:
    maps from a row to those that it has, if any.
    """

    flags: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    problems: dict[int, tuple[Problem, ...]] = field(default_factory=dict)
    files: dict[int, tuple[FileState, ...]] = field(default_factory=dict)
    keys: dict[int, tuple[str, ...]] = field(default_factory=dict)
    regions: dict[int, Region] = field(default_factory=dict)

    @classmethod
    def unknown(cls, count: int) -> "CheckedRows":
        """The state in which nothing is known about any of ``count`` rows."""
        return cls([0] * count, [""] * count, [0] * count, [""] * count, [""] * count, [""] * count)

    def set(self, index: int, report: RowReport) -> None:
        """Record what was found about a row."""
        bits = zip((_READABLE, _DECODED, _MASK, _REFERENCE, _TEXT, _TARGET, _PAIR), _flags(report), strict=True)
        self.flags[index] = sum(bit for bit, present in bits if present) + _IMAGES * report.images
        self.ids[index], self.lines[index], self.sources[index] = report.id, report.line, report.source
        self.names[index], self.contents[index] = report.file, report.content
        for known in (self.problems, self.files, self.keys, self.regions):
            known.pop(index, None)
        if report.region:
            self.regions[index] = report.region
        if report.keys:
            self.keys[index] = report.keys
        if report.problems:
            self.problems[index] = report.problems
        if report.files:
            self.files[index] = report.files

    def known(self, index: int, *, decode: Collection[int]) -> bool:
        """Whether the row need not be examined. A row that could not be read is read again, because its files may exist by now."""
        flags = self.flags[index]
        return bool(flags & _READABLE) and bool(flags & _DECODED or index not in decode)

    def changed(self) -> list[int]:
        """The rows with an image file whose size or time has changed since it was examined."""
        return [index for index, files in self.files.items() if any(file_state(file[0]) != file for file in files)]

    def lacks(self, index: int, required: RowRequirements) -> bool:
        """Whether a readable row lacks something that the run needs."""
        flags = self.flags[index]
        if not flags & _READABLE:
            return False
        least, most = required.images
        return (
            not least <= flags // _IMAGES <= most
            or (required.mask and not flags & _MASK)
            or (required.reference and not flags & _REFERENCE)
            or (required.text and not flags & _TEXT)
            or (required.target and not flags & _TARGET)
            or (required.pairs and not flags & _PAIR)
        )

    def findings(self, resize: Resize | None = None) -> Iterator[tuple[int, list[Problem]]]:
        """The index and the problems of each row, in order. If an id is repeated, the later row has the error. ``resize``: how the
        images are resized; a row whose mask this would crop away has an error."""
        seen: dict[str, tuple[str, int]] = {}
        for index, flags in enumerate(self.flags):
            found = list(self.problems.get(index, ()))
            if flags & _READABLE:
                place = self.names[index], self.lines[index]
                first = seen.setdefault(self.ids[index], place)
                if first != place:
                    text = f"the id {self.ids[index]!r} is taken by {first[0]}:{first[1]}"
                    found.insert(0, Problem(*place, text))
                if resize is not None and index in self.regions:
                    found += self._cropped(index, resize)
            yield index, found

    def _cropped(self, index: int, resize: Resize) -> Iterator[Problem]:
        """The problem of a row whose images lose too much when they are cropped to the shape that ``resize`` gives them."""
        place = self.names[index], self.lines[index]
        *source, across, down = self.regions[index]
        canvas = source[0], source[1]
        size, masked = resize.size(canvas), bool(self.flags[index] & _MASK)
        what = "mask" if masked else "region that the target changes"
        kept = math.prod(kept_by_fit(canvas, size=size))
        if reason := removed_by_fit(what, (across, down), canvas, size=size):
            yield Problem(*place, reason, "error" if masked else "note")
        elif kept < _KEPT:
            shapes = f"{canvas[0]}x{canvas[1]} to the middle, in the shape of {size[0]}x{size[1]}"
            yield Problem(*place, f"the crop of {shapes}, keeps {kept:.0%} of the image", "note")


def checked_rows(rows: Rows, *, check: CheckedShare = "all", seed: int = 0, max_pixels: int = MAX_PIXELS) -> CheckedRows:
    """Examine all rows that are not known from an earlier check.

    ``check``: the rows whose images are decoded: "all", the "first" ones, or this number of rows, drawn with ``seed``. All rows are
    read. Raises ValueError under the same conditions as ``examine_all``.
    """
    count = len(rows)
    decode = _decoded_rows(check, count, seed)
    identity = _identity(rows)
    if identity is None:
        found = CheckedRows.unknown(count)
        for index, report in examine_all(rows, range(count), max_pixels=max_pixels, decode=decode):
            found.set(index, report)
        return found
    kept = _Kept(identity, count, max_pixels)
    with kept.locked():
        found = kept.read() or CheckedRows.unknown(count)
        again = found.changed()
        if again:
            _log.info("%s: rows whose image files have changed are checked again: %d", identity.file, len(again))
        for index in again:
            found.flags[index] = 0
        todo = [index for index in range(count) if not found.known(index, decode=decode)]
        start = time.monotonic()
        for index, report in examine_all(rows, todo, max_pixels=max_pixels, decode=decode, name=identity.file):
            found.set(index, report)
        if todo:
            place = kept.write(found)
            if place is not None and time.monotonic() - start > 1:
                _log.info("checked %d rows in %.0f s; the result is kept in %s", len(todo), time.monotonic() - start, place)
    return found


def _decoded_rows(check: CheckedShare, count: int, seed: int) -> Collection[int]:
    if check == "all":
        return range(count)
    return range(min(FIRST, count)) if check == "first" else frozenset(limit(range(count), n=check, seed=seed))


def _identity(rows: Rows) -> Identity | None:
    identify = getattr(rows, "identity", None)
    found = None if identify is None else identify()
    assert found is None or isinstance(found, Identity)
    return found


def _flags(report: RowReport) -> tuple[bool, ...]:
    return report.readable, report.decoded, report.mask, report.reference, report.text, report.target, report.pair


class _Kept:
    """The file that stores the result of checking a data set."""

    def __init__(self, identity: Identity, count: int, max_pixels: int) -> None:
        self._identity, self._count = identity, count
        self._digest = f"{identity.digest}-{max_pixels}"
        name = f"check-{identity.digest[:40]}{'' if max_pixels == MAX_PIXELS else f'-{max_pixels}'}.json"
        self._places = [folder / name for folder in self._folders()]
        self._path = next((path for path in self._places if _writable(path.parent)), None)

    def _folders(self) -> Iterator[Path]:
        if self._identity.folder is not None:
            yield self._identity.folder / FOLDER
        user = user_folder("XDG_CACHE_HOME", ".cache")
        if user is not None:
            yield user / "checks"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While this context is open, no other process of this machine checks the data set; the others wait and read the result."""
        if self._path is None:
            yield
            return
        with ExitStack() as stack:
            with suppress(OSError):  # on a file system without locks, each process checks
                handle = stack.enter_context(files.open_file(self._path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT))
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def read(self) -> CheckedRows | None:
        """The stored result; None if there is none that fits. Folders that are not writable are searched too."""
        for path in self._places:
            try:
                found = self._decode(json.loads(files.read_bytes(path)))
            except FileNotFoundError:
                continue
            except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
                _log.warning("ignored the damaged result of a check, %s: %s", path, error)
                continue
            if found is not None:
                return found
        return None

    def write(self, found: CheckedRows) -> Path | None:
        """Replace the stored result and return its path; None if the result cannot be stored."""
        file = self._identity.file
        if self._path is None or any(name not in ("", file) for name in found.names):
            return None
        content = {
            "version": _VERSION,
            "digest": self._digest,
            "flags": found.flags,
            "ids": found.ids,
            "lines": found.lines,
            "sources": found.sources,
            "contents": found.contents,
            "problems": [[i, p.line, p.what, p.severity] for i, each in sorted(found.problems.items()) for p in each],
            "files": [[i, self._short(name), *state] for i, each in sorted(found.files.items()) for name, *state in each],
            "regions": [[i, *each] for i, each in sorted(found.regions.items())],
            "keys": [[i, *each] for i, each in sorted(found.keys.items())],
        }
        try:
            text = json.dumps(content, ensure_ascii=True, allow_nan=False)
            files.write_atomic(self._path, text.encode(), durable=False)
        except OSError as error:
            _log.warning("could not keep the result of the check in %s: %s", self._path.parent, error)
            return None
        return self._path

    def _decode(self, content: Any) -> CheckedRows | None:
        if content["version"] != _VERSION or content["digest"] != self._digest:
            return None
        columns = [content[name] for name in ("flags", "ids", "lines", "sources", "contents")]
        if any(not isinstance(column, list) or len(column) != self._count for column in columns):
            raise ValueError("the columns do not have one entry per row")
        _require(columns[0], int)
        _require(columns[1], str)
        _require(columns[2], int)
        _require(columns[3], str)
        _require(columns[4], str)
        flags, ids, lines, sources, contents = columns
        names = [self._identity.file if each & _READABLE else "" for each in flags]
        found = CheckedRows(flags, ids, lines, sources, names, contents)
        for index, line, what, severity in content["problems"]:
            if severity not in ("error", "note") or not isinstance(line, int) or not isinstance(what, str):
                raise ValueError("an entry of the list of problems is invalid")
            found.problems[_index(index, self._count)] = (
                *found.problems.get(index, ()),
                Problem(self._identity.file, line, what, severity),
            )
        for index, name, size, changed in content["files"]:
            state = (self._long(name), int(size), int(changed))
            found.files[_index(index, self._count)] = (*found.files.get(index, ()), state)
        for index, width, height, across, down in content["regions"]:
            found.regions[_index(index, self._count)] = (int(width), int(height), float(across), float(down))
        for index, *keys in content["keys"]:
            _require(keys, str)
            found.keys[_index(index, self._count)] = tuple(keys)
        return found

    def _short(self, name: str) -> str:
        """The name of a file relative to the data set, so that the data set may be moved."""
        folder = self._identity.folder
        root = "" if folder is None else f"{folder.resolve()}{os.sep}"
        return name.removeprefix(root) if root else name

    def _long(self, name: str) -> str:
        folder = self._identity.folder
        return name if folder is None else os.path.join(folder.resolve(), name)


def _require(column: Sequence[Any], kind: type) -> None:
    if any(type(value) is not kind for value in column):
        raise ValueError(f"a column has values that are not of type {kind.__name__}")


def _index(index: Any, count: int) -> int:
    if not isinstance(index, int) or not 0 <= index < count:
        raise ValueError(f"there is no row {index!r}; the data set has {count} rows")
    return index


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False
