"""Crash-safe files: a whole file is replaced atomically, and a line is appended with a single write.

A run's folder may come from another person, so its files are opened only here: a link, a pipe or a device in place of a file is
refused, a file with a second name (a hard link) is not written to, and a temporary file has a random name and must be new.
``inside`` refuses folders that are links.

JSON is strict: a number that JSON cannot represent (NaN, infinity) is written as null. Floats are written so that reading them
gives the same bits. If a process is killed while it writes, the last line may have no newline; readers ignore such a line, and
``repair.keep_until`` removes it.
"""

import codecs
import errno
import fcntl
import io
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from retouch.config.keys import without_secrets

if TYPE_CHECKING:
    from PIL.Image import Image

TEMPORARY = ".tmp-"
"""The start of the names of temporary files and folders."""
MOST_BYTES = 1 << 30
_MOST_RECORD_BYTES = 1 << 26
LONGEST_LINE = 1 << 24
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


MOST_DEPTH = 100
MOST_DIGITS = 300


def strict_json(text: str | bytes | bytearray) -> Any:
    """Parse a JSON value.

    Raises ValueError if the text is not UTF-8, for NaN and infinity, a number that is too large for a float, an integer of more
    than ``MOST_DIGITS`` digits, a repeated key, and values that are nested more than ``MOST_DEPTH`` deep.
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = DECODER.decode(decoded)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value] if decoded.count("[") + decoded.count("{") > MOST_DEPTH else []
    for _ in range(MOST_DEPTH if level else 0):
        items = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in items if isinstance(item, dict | list)]
    if level:
        raise ValueError("nested too deep")
    return value


def _finite(digits: str) -> float:
    value = float(digits)  # also NaN and Infinity
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is {'too large' if digits[-1].isdigit() else 'not a JSON number'}")
    return value


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"{digits:.40} has more than {MOST_DIGITS} digits")
    return int(digits)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return fields


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, parse_int=_integer, object_pairs_hook=_no_repeats)


Shape: TypeAlias = TypeAdapter[Any]


def checked(shape: Shape, value: Any, where: str) -> Any:
    """Return the value. Raises ValueError, which begins with ``where``, if it does not have the shape."""
    try:
        shape.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part)[:60] for part in first["loc"])
        raise ValueError(f"{where}: {key}: {first['msg']}; another program has changed the file") from None
    return value


def jsonable(value: Any) -> Any:
    """Convert the value to strict JSON: non-finite numbers become None, tuples lists, and paths text; mappings keep their order."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def inside(root: Path, *names: str) -> Path:
    """Return the path below a run's folder ``root``, which may itself be a link. Raises OSError if a part of it below ``root`` is
    a link, or if a name is not that of a file or folder (``..``, ``a/b``)."""
    path = root
    for name in names:
        path = path / name
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise _refused(path, "not the name of a file in a run's folder")
        if path.is_symlink():
            raise _refused(path, "a link")
    return path


def require_plain(root: Path, *, except_below: Collection[str] = ()) -> None:
    """Raise OSError, with the path, if the folder contains a link, a pipe, a device or a socket, at any depth.

    ``except_below``: names of folders in ``root`` whose content is not examined. A folder that does not exist is plain.
    """
    pending = [root] if root.exists() else []
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    if path.parent != root or entry.name not in except_below:
                        pending.append(path)
                elif not entry.is_file(follow_symlinks=False):
                    raise _refused(path, "a link" if entry.is_symlink() else "not a file")


def open_handle(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a run's folder, and return the descriptor. With O_TRUNC, the file is emptied after it was examined.

    Raises OSError, without waiting, if it is a link, a pipe, a device or a folder, and if it would be written to although it has a
    second name (a hard link).
    """
    try:
        handle = os.open(path, (flags & ~os.O_TRUNC) | _SAFE, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refused(path, "a link" if error.errno == errno.ELOOP else "not a file") from None
        raise
    try:
        _require_file(path, os.fstat(handle), writes=flags & (os.O_WRONLY | os.O_RDWR) > 0)
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def require_file(path: Path, *, writes: bool) -> None:
    """Raise OSError as ``open_handle`` does, for a library that opens the file itself. A missing file is allowed."""
    with suppress(FileNotFoundError):
        _require_file(path, path.lstat(), writes=writes)


def _require_file(path: Path, found: os.stat_result, *, writes: bool) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "a link" if stat.S_ISLNK(found.st_mode) else "not a file")
    if writes and found.st_nlink > 1:
        raise _refused(path, "a file with a second name (a hard link)")


def open_file(path: Path, flags: int = os.O_RDONLY) -> IO[bytes]:
    """Open a file of a run's folder for reading, or, with O_WRONLY, for writing. Raises OSError as ``open_handle`` does."""
    return open(path, "wb" if flags & os.O_WRONLY else "rb", opener=lambda *_: open_handle(path, flags))


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Read a file of a run's folder (see ``open_handle``). Raises OSError if it has more than ``most`` bytes."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return file.read(most)


def _refused(path: Path, what: str) -> OSError:
    return OSError(errno.ELOOP, f"{what}, and a run's folder may contain only files and folders", str(path))


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a new temporary file in the same folder, which replaces ``path`` when the block ends; if it raises, it is removed.

    ``durable``: wait until the file is on disk, so that it survives a power failure.
    """
    temporary = path.with_name(TEMPORARY + secrets.token_hex(8))
    with naming(path):
        with open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            try:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if durable:
            fsync_folder(path.parent)


@contextmanager
def locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """Open a file (see ``open_handle``), wait for the exclusive lock on it, and yield the descriptor.

    Raises OSError with ENOLCK or ENOTSUP on a file system without locks.
    """
    handle = open_handle(path, flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a whole file: write a temporary file, flush it to disk if ``durable``, and replace the old file with it."""
    with replacing(path, durable=durable) as file:
        file.write(content)


def png(image: "Image") -> bytes:
    """The pixels of an image as a PNG file, compressed fast, without EXIF data and colour profile."""
    content = io.BytesIO()
    image.save(content, format="PNG", compress_level=1, exif=b"", icc_profile=None)
    return content.getvalue()


def write_png(path: Path, image: "Image", **options: Any) -> None:
    """Write an image as a PNG file, so that a killed process leaves a complete file or none. ``options``: those of Pillow."""
    content = io.BytesIO()
    image.save(content, format="PNG", **options)
    write_atomic(path, content.getvalue(), durable=False)


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
    """Read one JSON value of a model or of data, whose files may be links; a byte order mark is skipped.

    Raises ValueError with the file's name if it is not valid JSON.
    """
    try:
        return json.loads(read_bytes(path.resolve()).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_record(path: Path, shape: Shape | None = None) -> Any:
    """Read one strict JSON value of at most 64 MiB from a run's folder (see ``read_bytes``). Raises ValueError as ``read_json``
    does, and if it has another shape."""
    try:
        value = strict_json(read_bytes(path, most=_MOST_RECORD_BYTES).removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return value if shape is None else checked(shape, value, str(path))


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
    handle = open_handle(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
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


def read_lines(path: Path, shape: Shape | None = None) -> list[dict[str, Any]]:
    """Read the lines of a JSON Lines file; none if it does not exist. Raises ValueError if a complete line is not an object, or has
    another shape."""
    try:
        complete = read_bytes(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    values = []
    for number, line in enumerate(complete, start=1):
        where = f"{path}, line {number}"
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{where}: has more than {LONGEST_LINE} bytes; another program has changed the file")
        try:
            value = strict_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error}); another program has changed the file") from error
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, found {type(value).__name__}")
        values.append(value if shape is None else checked(shape, value, where))
    return values


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write all lines of a JSON Lines file atomically."""
    write_atomic(path, b"".join(json_line(line) for line in lines))
