"""Crash-safe files: a whole file is replaced atomically, and a line is appended with a single write.

JSON is strict: a number that JSON cannot represent (NaN, infinity) is written as null. Floats are written so that reading them
gives the same bits. If a process is killed while it writes, the last line may have no newline; readers ignore such a line, and
``repair.keep_until`` removes it.
"""

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retouch.config.redaction import without_secrets

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


def jsonable(value: Any) -> Any:
    """Convert the value to strict JSON: non-finite numbers become None, tuples lists, and paths text; mappings keep their order."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file: write a temporary file, flush it to disk, and replace the old file with it."""
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that names no file (for example, if the disk is full)."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def fsync_folder(path: Path) -> None:
    """Flush the entries of a folder (or the content of a file) to disk, so that a power failure does not undo a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value, indented, atomically."""
    write_atomic(path, _encode(json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)))


def read_json(path: Path) -> Any:
    """Read one JSON value; a byte order mark is skipped. Raises ValueError with the file's name if it is not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def json_line(value: Mapping[str, Any]) -> bytes:
    """Encode one line of a JSON Lines file, with the keys in the given order. Keys of judges are removed from texts."""
    line = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)
    if without_secrets(line) != line:  # rare; a secret is replaced in the texts only, so that the line stays JSON
        line = _TEXT.sub(lambda text: json.dumps(without_secrets(json.loads(text[0])), ensure_ascii=False), line)
    return _encode(line)


def _encode(line: str) -> bytes:
    # An unpaired surrogate, which foreign text may contain, has no UTF-8 encoding; its backslash escape is valid JSON.
    return (line + "\n").encode("utf-8", "backslashreplace")


def append_line(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Append one line with a single write. ``durable``: wait until it is on disk, so that it survives a power failure."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        line = json_line(value)
        with naming(path):
            before = os.fstat(handle).st_size
            if os.write(handle, line) < len(line):  # the disk became full while the line was written
                os.ftruncate(handle, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSON Lines file; none if it does not exist. Raises ValueError if a complete line is not an object."""
    if not path.exists():
        return []
    complete = path.read_bytes().split(b"\n")[:-1]
    return [_parse(line, path, number) for number, line in enumerate(complete, start=1)]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write all lines of a JSON Lines file atomically."""
    write_atomic(path, b"".join(json_line(line) for line in lines))


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error}); another program has changed the file") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
    return value
