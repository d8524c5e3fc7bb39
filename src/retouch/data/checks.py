"""Checks of data: every row and every pixel is read as training does, and the result is stored for later starts.

Training calls ``accept_rows`` before its first step, so that no row turns out to be bad later. The result is one JSON file in the
folder ``.retouch`` of the data set, or in the user's cache folder if the former is not writable. The file name contains a digest of
the row list and of how its columns are read, so a changed list is checked again. Image files are compared by size and modification
time, and rows whose files have changed are examined again. A result that cannot be read is ignored.
"""

import functools
import json
import logging
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from PIL import Image, ImageChops
from pydantic import TypeAdapter

from retouch.config.consent import user_folder
from retouch.data.images import (
    MAX_PIXELS,
    EncodedImage,
    kept_by_fit,
    load_image,
    load_mask,
    off_centre,
    read_header,
    removed_by_fit,
)
from retouch.data.rows import Identity, InvalidRow, Problem, Row, RowRequirements, Rows, content_key, image_keys
from retouch.data.tasks import grouped, limit, require_same_size
from retouch.records import files

CheckedShare: TypeAlias = Literal["all", "first"] | int
"""Rows whose images are decoded before training: all, the first ones, or this number of rows, drawn with a seed."""
OnBadRow: TypeAlias = Literal["refuse", "skip"]
FileState: TypeAlias = tuple[str, int, int]
"""Path, size in bytes and time of the last change in ns; size and time are -1 for a file that does not exist."""
SHOWN = 5
FOLDER = ".retouch"
FIRST = 64
"""Number of rows whose images ``check="first"`` decodes."""
BLOCK = 64
PARALLEL_FROM = 256
"""The smallest number of rows for which further processes are started."""
_KEPT = 0.5
"""The share of an image that a crop keeps without a note."""
_VERSION = 5
_CHANGED = 16  # in levels of 255, more than lossy formats change
_THREADS = 8  # decoding releases the interpreter's lock
_MAX_PROCESSES = 32
_FIRST_REPORT, _REPORT_EVERY = 3.0, 10.0

_log = logging.getLogger("retouch")


@dataclass(frozen=True, slots=True)
class RowReport:
    """What is known about a row. ``readable``: whether its fields make a task. ``decoded``: whether its images were decoded too.

    ``keys``: of its images (``rows.image_keys``), and of their pixels if they were decoded; rows that share a key share an image.
    ``region``: the width and height of the image that decides the size of the others, and the ``off_centre`` of the mask, or of
    what the target changes; only of decoded rows. ``files``: the image files that the row names. ``content``: two keys, of the
    texts, tags and other columns, and of the pixels ("-" if they were not decoded); they do not depend on the id and place of the
    row, nor on the names and formats of its files. If ``readable`` is False, the fields after it have no meaning.
    """

    problems: tuple[Problem, ...]
    decoded: bool
    readable: bool
    file: str = ""
    line: int = 0
    id: str = ""
    source: str = ""
    images: int = 0
    mask: bool = False
    reference: bool = False
    text: bool = False
    target: bool = False
    pair: bool = False
    turns: int = 0
    files: tuple[FileState, ...] = ()
    keys: tuple[str, ...] = ()
    region: tuple[int, int, float, float] | None = None
    content: str = ""


@dataclass(frozen=True)
class AcceptedRows:
    """The rows that a run uses. ``indices``: their numbers, ascending. ``sources``: the source of each of them, for
    ``split_by_source``; rows that share any image have one source. ``keys``: of the images of each of them. ``problems``: the
    problems of all rows of the data set. ``contents``: ``RowReport.content`` by row number."""

    indices: tuple[int, ...]
    sources: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    problems: tuple[Problem, ...]
    contents: Mapping[int, str]


def accept_rows(
    rows: Rows,
    *,
    on_bad_row: OnBadRow,
    required: RowRequirements | None = None,
    check: CheckedShare = "all",
    seed: int = 0,
    resize: tuple[int, int] | None = None,
) -> AcceptedRows:
    """The usable rows of a data set.

    ``required``: what every row must have. ``check``: the rows whose images are decoded: "all", the "first" ones, or this number of
    rows, drawn with ``seed``; all other rows are only read. ``resize``: the (width, height) of the resized images; a row whose mask
    this would crop away is bad, and rows that lose much of their images are logged.

    ``on_bad_row``: "refuse" raises ValueError if any row is bad; the message has the number of bad rows, and the first few of them
    by file and line. "skip" leaves bad rows out and logs them. Both raise ValueError if no row is left.
    """
    if on_bad_row not in ("refuse", "skip"):
        raise ValueError(f'on_bad_row must be "refuse" or "skip", not {on_bad_row!r}')
    reports = examined(rows, check=check, seed=seed)
    problems, good, errors = list(rows.problems), [], []
    for index, found in _findings(reports, resize):
        report = reports[index]
        if required is not None and report.readable:
            has = {part: getattr(report, part) for part in ("mask", "reference", "text", "target", "pair", "turns")}
            if lacking := required.lacking(report.images, **has):
                found = [Problem(report.file, report.line, what) for what in lacking]
        problems += found
        wrong = [problem for problem in found if problem.severity == "error"]
        errors += wrong[:1]
        if not wrong:
            good.append(index)
    if errors and (on_bad_row == "refuse" or not good):
        shown = "\n".join(f"  {problem}" for problem in errors[:SHOWN])
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise ValueError(
            f"{len(errors)} of {len(rows)} rows cannot be used:\n{shown}{more}\n"
            'Fix them (`retouch data check` lists all of them), or leave them out with data.on_bad_row: "skip" (an argument of a '
            "Trainer: data={'on_bad_row': 'skip'})."
        )
    if not good:
        raise ValueError("no rows to train on")
    cropped = [problem for problem in problems if problem.severity == "note" and problem.what.startswith("the crop of")]
    if cropped:
        _log.warning(
            "%d of %d rows are cropped to less than half, or lose what they change:\n%s", len(cropped), len(rows), cropped[0]
        )
    if errors:
        _log.warning("skipped %d of %d rows:\n%s", len(errors), len(rows), "\n".join(str(problem) for problem in errors))
    keys = tuple(reports[index].keys for index in good)
    sources = grouped([reports[index].source or reports[index].id for index in good], keys)
    return AcceptedRows(tuple(good), tuple(sources), keys, tuple(problems), {index: reports[index].content for index in good})


def find_problems(
    rows: Rows, *, max_pixels: int = MAX_PIXELS, resize: tuple[int, int] | None = None
) -> Iterator[tuple[int, list[Problem]]]:
    """The index and the problems of each row, in order. If an id is repeated, the later row has the error."""
    return _findings(examined(rows, max_pixels=max_pixels), resize)


def _findings(reports: Sequence[RowReport], resize: tuple[int, int] | None) -> Iterator[tuple[int, list[Problem]]]:
    seen: dict[str, tuple[str, int]] = {}
    for index, report in enumerate(reports):
        found, place = list(report.problems), (report.file, report.line)
        if report.readable and (first := seen.setdefault(report.id, place)) != place:
            found.insert(0, Problem(*place, f"the id {report.id!r} is taken by {first[0]}:{first[1]}"))
        if resize is not None and report.region is not None:
            width, height, *off = report.region
            what = "mask" if report.mask else "region that the target changes"
            kept = math.prod(kept_by_fit((width, height), size=resize))
            if reason := removed_by_fit(what, (off[0], off[1]), (width, height), size=resize):
                found.append(Problem(*place, reason, "error" if report.mask else "note"))
            elif kept < _KEPT:
                shapes = f"{width}x{height} to the middle, in the shape of {resize[0]}x{resize[1]}"
                found.append(Problem(*place, f"the crop of {shapes}, keeps {kept:.0%} of the image", "note"))
        yield index, found


def combined_content(contents: Sequence[str]) -> dict[str, str | int]:
    """What is known about the content of rows, from their ``RowReport.content``, in any order: their number, and a key of their
    texts and of their images. Images are left out if those of a row were not decoded."""
    texts, images = zip(*(each.split(" ") for each in contents), strict=True) if contents else ((), ())
    found: dict[str, str | int] = {"the number of rows": len(contents)}
    for name, keys in {"the text of a row": texts, "an image of a row": images}.items():
        if "-" not in keys:
            found[name] = content_key(" ".join(sorted(keys)).encode())
    return found


def examined(rows: Rows, *, check: CheckedShare = "all", seed: int = 0, max_pixels: int = MAX_PIXELS) -> list[RowReport]:
    """The reports of all rows, from the stored result as far as it holds. ``check``: the rows whose images are decoded, as in
    ``accept_rows``. Raises ValueError under the same conditions as ``examine_all``."""
    count = len(rows)
    decode: Collection[int] = range(count if check == "all" else min(FIRST, count))
    if isinstance(check, int):
        decode = frozenset(limit(range(count), n=check, seed=seed))
    identity: Identity | None = rows.identity() if hasattr(rows, "identity") else None
    if identity is None:
        return [report for _, report in examine_all(rows, range(count), max_pixels=max_pixels, decode=decode)]
    name = f"check-{identity.digest[:40]}{'' if max_pixels == MAX_PIXELS else f'-{max_pixels}'}.json"
    user = user_folder("XDG_CACHE_HOME", ".cache")
    folders = [*([] if identity.folder is None else [identity.folder / FOLDER]), *([] if user is None else [user / "checks"])]
    path = next((folder / name for folder in folders if _writable(folder)), None)
    with ExitStack() as stack:
        if path is not None:
            # Other processes of this machine wait, and read the result. On a file system without locks, each process checks.
            with suppress(OSError):
                stack.enter_context(files.locked(path.with_suffix(".lock")))
        # Folders that are not writable are read too.
        stored = (_read(folder / name, identity, count, max_pixels) for folder in folders)
        found: list[RowReport | None] = next((each for each in stored if each is not None), [None] * count)
        changed = [i for i, each in enumerate(found) if each and any(file_state(file[0]) != file for file in each.files)]
        if changed:
            _log.info("%s: rows whose image files have changed are checked again: %d", identity.file, len(changed))
        for index in changed:
            found[index] = None
        # A row that could not be read is read again, because its files may exist by now.
        todo = [i for i, each in enumerate(found) if not (each and each.readable and (each.decoded or i not in decode))]
        start = time.monotonic()
        for index, report in examine_all(rows, todo, max_pixels=max_pixels, decode=decode, name=identity.file):
            found[index] = report
        reports = [each for each in found if each is not None]
        if todo and path is not None and all(each.file in ("", identity.file) for each in reports):
            try:
                root = "" if identity.folder is None else f"{identity.folder.resolve()}{os.sep}"
                # Without the names of files and folders, so that the data set may be moved.
                moved = [_placed(each, "", lambda file: file.removeprefix(root)) for each in reports]
                content = _stored_form().dump_json(
                    _Stored(_VERSION, f"{identity.digest}-{max_pixels}", moved), exclude_defaults=True
                )
                files.write_atomic(path, content, durable=False)
                if time.monotonic() - start > 1:
                    _log.info("checked %d rows in %.0f s; the result is kept in %s", len(todo), time.monotonic() - start, path)
            except OSError as error:
                _log.warning("could not keep the result of the check in %s: %s", path.parent, error)
    return reports


@dataclass(frozen=True, slots=True)
class _Stored:
    """The content of the file that stores the result of checking a data set."""

    version: int
    digest: str
    rows: list[RowReport]


@functools.cache
def _stored_form() -> TypeAdapter[_Stored]:
    return TypeAdapter(_Stored)


def _read(path: Path, identity: Identity, count: int, max_pixels: int) -> list[RowReport | None] | None:
    """The stored reports; None if there are none that fit."""
    try:
        found = _stored_form().validate_json(files.read_bytes(path), strict=True)
        if (found.version, found.digest) != (_VERSION, f"{identity.digest}-{max_pixels}"):
            return None
        if len(found.rows) != count:
            raise ValueError(f"it has {len(found.rows)} rows, and the data set {count}")
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        _log.warning("ignored the damaged result of a check, %s: %s", path, str(error).splitlines()[0])
        return None
    folder = "" if identity.folder is None else str(identity.folder.resolve())
    return [_placed(each, identity.file, lambda file: os.path.join(folder, file)) for each in found.rows]


def _placed(report: RowReport, file: str, renamed: Callable[[str], str]) -> RowReport:
    """The report for the metadata file ``file``, with the image files ``renamed``."""
    return replace(
        report,
        file=file if report.readable else "",
        problems=tuple(replace(problem, file=file) for problem in report.problems),
        files=tuple((renamed(name), size, changed) for name, size, changed in report.files),
    )


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def file_state(path: Path | str) -> FileState:
    """The current size and modification time of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return str(path), -1, -1
    return str(path), found.st_size, found.st_mtime_ns


def examine_all(
    rows: Rows, indices: Sequence[int], *, max_pixels: int, decode: Collection[int], name: str = ""
) -> Iterator[tuple[int, RowReport]]:
    """The reports of the rows ``indices``, in order. ``decode``: the rows whose images are decoded. ``name``: the name of the data
    set in the log.

    On Linux, many rows are distributed over several processes, at most one for each CPU that this process may use. Raises
    ValueError if one of these processes is killed.
    """
    processes = min(available_cpus(), _MAX_PROCESSES, len(indices) // (PARALLEL_FROM // 2))
    blocks = [indices[start : start + BLOCK] for start in range(0, len(indices), BLOCK)]
    if processes < 2 or sys.platform != "linux":
        with ThreadPoolExecutor(_THREADS) as threads:
            read = (
                (block, threads.map(lambda index: examine(rows, index, max_pixels=max_pixels, decode=index in decode), block))
                for block in blocks
            )
            yield from _logged(read, len(indices), name)
        return
    # "fork" neither copies the rows nor imports the user's script again. The forked processes use no lock of this process.
    context = multiprocessing.get_context("fork")
    given = (rows, max_pixels, decode)
    try:
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_process, initargs=given) as pool:
            yield from _logged(zip(blocks, pool.map(_examine_block, blocks), strict=True), len(indices), name)
    except BrokenProcessPool:
        raise ValueError(
            f"{name or 'the data set'}: a process that decodes images was killed, probably because the memory was used up; "
            "make the largest images smaller, or use fewer CPUs (taskset -c 0 ...)"
        ) from None


def _logged(blocks: Iterable[tuple[Sequence[int], Iterable[RowReport]]], total: int, name: str) -> Iterator[tuple[int, RowReport]]:
    """The rows of the blocks, each with its report. Logs the progress of a long check, and an estimate of the remaining time."""
    done, start = 0, time.monotonic()
    following = start + _FIRST_REPORT
    for block, reports in blocks:
        yield from zip(block, reports, strict=True)
        done += len(block)
        now = time.monotonic()
        if now >= following and done < total:
            following = now + _REPORT_EVERY
            left = (now - start) * (total - done) / done
            shown = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
            _log.info("checking %s: %d of %d rows, about %s left", name, done, total, shown)


def available_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_given: tuple[Rows, int, Collection[int]] | None = None
"""In a process of the pool: the rows, the largest number of pixels, and the indices of the rows whose images are decoded."""


def _start_process(rows: Rows, max_pixels: int, decode: Collection[int]) -> None:
    global _given
    _given = rows, max_pixels, decode


def _examine_block(block: Sequence[int]) -> list[RowReport]:
    assert _given is not None, "_start_process has been called"
    rows, max_pixels, decode = _given
    return [examine(rows, index, max_pixels=max_pixels, decode=index in decode) for index in block]


def examine(rows: Rows, index: int, *, max_pixels: int, decode: bool = True) -> RowReport:
    """Read one row, and decode its images if ``decode`` is set. A bad row raises no error; its problems are in the report."""
    try:
        row = rows[index]
    except InvalidRow as bad:
        return RowReport(bad.problems, decode, readable=False)
    encoded = (*row.images, row.mask, row.reference, row.target, row.chosen, row.rejected)
    texts = json.dumps([row.instruction, row.text, dict(row.tags), dict(row.meta)], sort_keys=True, default=str)
    known = RowReport(
        problems=(),
        decoded=decode,
        readable=True,
        file=row.file,
        line=row.line,
        id=row.id,
        source=row.source,
        images=len(row.images),
        mask=row.mask is not None,
        reference=row.reference is not None,
        text=bool((row.text or "").strip()),
        target=row.target is not None,
        pair=row.chosen is not None and row.rejected is not None,
        turns=row.turns,
        files=tuple(file_state(image.data) for image in encoded if image is not None and isinstance(image.data, Path)),
        keys=image_keys(row),
        content=f"{content_key(texts.encode())} -",
    )
    return _with_pixels(known, row, max_pixels) if decode else known


def _with_pixels(report: RowReport, row: Row, max_pixels: int) -> RowReport:
    """The report with what is found by decoding the images of the row."""
    problems: list[Problem] = []
    keys: list[str] = []

    def add(what: str, severity: Literal["error", "note"] = "note") -> None:
        problems.append(Problem(row.file, row.line, what, severity))

    def load(encoded: EncodedImage | None) -> Image.Image | None:
        if encoded is None:
            return None
        try:
            header = read_header(encoded, max_pixels=max_pixels)
            image = load_image(encoded, max_pixels=max_pixels)
        except ValueError as error:
            add(str(error), "error")
            return None
        if header.rotated:
            add(f"{encoded.name}: rotated as its EXIF says")
        if header.profile == "converted":
            add(f"{encoded.name}: has a colour profile, converted to sRGB")
        if header.profile == "unusable":
            add(f"{encoded.name}: its colour profile is damaged or of other colours, and is not applied")
        if header.mode != "RGB":
            add(f"{encoded.name}: mode {header.mode}, read as RGB")
        keys.append(content_key(repr(image.size).encode(), image.tobytes()))
        return image

    images = [load(image) for image in row.images]
    target, _, chosen, rejected = (load(image) for image in (row.target, row.reference, row.chosen, row.rejected))
    source = images[0] if images else None
    mask = None
    if row.mask is not None:
        try:
            mask = load_mask(row.mask, max_pixels=max_pixels)
            if (masked := source or target) is not None:
                require_same_size(mask.size, masked.size)
        except ValueError as error:
            mask = None
            add(str(error), "error")
    if mask is not None:
        values = [value for _, value in mask.getcolors() or ()]
        if values == [0]:
            add("the mask is all black: nothing should change")
        elif not set(values) <= {0, 255}:
            add(f"the mask has {len(values)} grey levels, not only black and white")
    if chosen is not None and rejected is not None:
        if chosen.size == rejected.size and chosen.tobytes() == rejected.tobytes():
            add("the chosen and the rejected image are the same, so there is nothing to prefer; remove the row", "error")
        if chosen.width * rejected.height != rejected.width * chosen.height:
            shapes = f"{chosen.width}x{chosen.height} and the rejected one {rejected.width}x{rejected.height}"
            add(f"the chosen image is {shapes}: resizing crops them to one aspect ratio")
    region = None
    if (canvas := source or target or chosen) is not None:
        edited = None
        if source is not None and target is not None and source.size == target.size:
            edited = ImageChops.difference(source, target).convert("L").point(lambda change: 255 * (change > _CHANGED))
        changed = mask or edited
        region = (*canvas.size, *((0.0, 0.0) if changed is None else off_centre(changed)))
    if source is not None and target is not None and target.width * source.height != target.height * source.width:
        shapes = f"{target.width}x{target.height} but its source {source.width}x{source.height}"
        add(f"the target is {shapes}: resizing crops them to one aspect ratio")
    pixels = [*keys, *([] if mask is None else [content_key(b"mask", mask.tobytes())])]
    return replace(
        report,
        problems=tuple(problems),
        keys=tuple(dict.fromkeys((*report.keys, *keys))),
        region=region,
        content=f"{report.content.removesuffix('-')}{content_key(' '.join(pixels).encode())}",
    )
