"""Files that survive a kill: whole files appear at once or not at all, and lines are appended one write at a time.

JSON here is strict: a number that JSON cannot hold (NaN, infinity) is written as null, and floats are written so that reading
gives the same bits back. A last line without its newline was cut by a kill; readers ignore it and ``truncate`` removes it.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The value as strict JSON: numbers that are not finite become None, tuples lists, paths text; mappings keep their order."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file: aside, flushed to the disk, then renamed over the old one."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's names to the disk, so that a rename is not lost with the power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value, indented, atomically."""
    write_atomic(path, _encode(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)))


def read_json(path: Path) -> Any:
    """Read one JSON value. ValueError names the file when it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def json_line(value: Mapping[str, Any]) -> bytes:
    """One line of a JSON-lines file, keys in the order given."""
    return _encode(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def _encode(written: str) -> bytes:
    # Half of a surrogate pair, which text from elsewhere may hold, has no UTF-8; as a backslash escape it is what JSON wants.
    return (written + "\n").encode("utf-8", "backslashreplace")


def append_line(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Append one line in one write; ``durable`` waits until the disk has it, so that not even a power cut takes it away."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        line = json_line(value)
        written = os.write(handle, line)
        assert written == len(line), f"short write to {path}"
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file; none where there is no file. ValueError names a line that is whole and yet not an object."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [_parse(line, path, number) for number, line in enumerate(whole, start=1)]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write all lines of a JSON-lines file atomically."""
    write_atomic(path, b"".join(json_line(line) for line in lines))


def truncate(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only the lines that ``keep`` accepts, byte for byte, and drop a torn last one; atomic."""
    if not path.exists():
        return
    before = path.read_bytes()
    whole = before.split(b"\n")[:-1]
    after = b"".join(line + b"\n" for number, line in enumerate(whole, start=1) if keep(_parse(line, path, number)))
    if after != before:
        write_atomic(path, after)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error}); the file was changed by something else") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
    return value
