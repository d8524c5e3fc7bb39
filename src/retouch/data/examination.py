"""Examines rows in several processes: reads them and decodes their images as training does."""

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from PIL import Image, ImageChops

from retouch.data.images import EncodedImage, load_image, load_mask, off_centre, read_header
from retouch.data.rows import InvalidRow, Problem, Row, Rows, content_key, image_keys
from retouch.data.tasks import require_same_size

FileState: TypeAlias = tuple[str, int, int]
"""Path, size in bytes and time of the last change in ns; size and time are -1 for a file that does not exist."""
Region: TypeAlias = tuple[int, int, float, float]
BLOCK = 64
PARALLEL_FROM = 256
"""The smallest number of rows for which further processes are started."""
_CHANGED = 16  # in levels of 255, more than lossy formats change
_THREADS = 8  # decoding releases the interpreter's lock
_MAX_PROCESSES = 32
_FIRST_REPORT, _REPORT_EVERY = 3.0, 10.0

_log = logging.getLogger("retouch")


@dataclass(frozen=True, slots=True)
class RowReport:
    """What is known about a row. ``readable``: whether its fields make a task. ``decoded``: whether its images were decoded too.

    ``keys``: of its images (``rows.image_keys``), and of their pixels if they were decoded; rows that share a key share an image.
    ``region``: the size of the image that decides the size of the others, (width, height), and the ``off_centre`` of the mask, or
    of what the target changes; only of decoded rows. ``files``: the image files that the row names.
    ``content``: see ``row_content``. If ``readable`` is False, the fields after it have no meaning.
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
    files: tuple[FileState, ...] = ()
    keys: tuple[str, ...] = ()
    region: Region | None = None
    content: str = ""


def examine(rows: Rows, index: int, *, max_pixels: int, decode: bool = True) -> RowReport:
    """Read one row, and decode its images if ``decode`` is set. A bad row raises no error; its problems are in the report."""
    try:
        row = rows[index]
    except InvalidRow as bad:
        return RowReport(bad.problems, decode, readable=False)
    files = tuple(file_state(image.data) for image in _images(row) if isinstance(image.data, Path))
    found = _Decoded(row, max_pixels) if decode else None
    return RowReport(
        problems=() if found is None else tuple(found.problems),
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
        files=files,
        keys=tuple(dict.fromkeys((*image_keys(row), *(() if found is None else found.keys)))),
        region=None if found is None else found.region,
        content=row_content(row, None if found is None else found.pixels),
    )


def row_content(row: Row, pixels: Sequence[str] | None) -> str:
    """Two keys: of the texts, tags and other columns of a row, and of the ``pixels`` of its images ("-" if they were not decoded).
    They do not depend on the row's id and place, nor on the names and formats of its files."""
    texts = json.dumps([row.instruction, row.text, dict(row.tags), dict(row.meta)], sort_keys=True, default=str)
    return f"{content_key(texts.encode())} {'-' if pixels is None else content_key(' '.join(pixels).encode())}"


def combined_content(contents: Sequence[str]) -> dict[str, str | int]:
    """What is known about the content of rows, from the results of ``row_content``, in any order: their number, and a key of their
    texts and of their images. Images are left out if those of a row were not decoded."""
    texts, images = zip(*(each.split(" ") for each in contents), strict=True) if contents else ((), ())
    found: dict[str, str | int] = {"the number of rows": len(contents)}
    for name, keys in {"the text of a row": texts, "an image of a row": images}.items():
        if "-" not in keys:
            found[name] = content_key(" ".join(sorted(keys)).encode())
    return found


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
    progress = _Progress(len(indices), name)
    if processes < 2 or sys.platform != "linux":
        with ThreadPoolExecutor(_THREADS) as threads:
            for block in blocks:
                decoded = [index in decode for index in block]
                found = threads.map(lambda index, one: examine(rows, index, max_pixels=max_pixels, decode=one), block, decoded)
                yield from zip(block, found, strict=True)
                progress.add(len(block))
        return
    # "fork" neither copies the rows nor imports the user's script again. The forked processes use no lock of this process.
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(
            processes, mp_context=context, initializer=_start_process, initargs=(rows, max_pixels, decode)
        ) as pool:
            for block, reports in zip(blocks, pool.map(_examine_block, blocks), strict=True):
                yield from zip(block, reports, strict=True)
                progress.add(len(block))
    except BrokenProcessPool:
        raise ValueError(
            f"{name or 'the data set'}: a process that decodes images was killed, probably because the memory was used up; "
            "make the largest images smaller, or use fewer CPUs (taskset -c 0 ...)"
        ) from None


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


class _Progress:
    """Logs the progress of a long check and an estimate of the remaining time."""

    def __init__(self, total: int, name: str) -> None:
        self._total, self._name = total, name
        self._done = 0
        self._start = time.monotonic()
        self._next = self._start + _FIRST_REPORT

    def add(self, rows: int) -> None:
        self._done += rows
        now = time.monotonic()
        if now < self._next or self._done == self._total:
            return
        self._next = now + _REPORT_EVERY
        left = (now - self._start) * (self._total - self._done) / self._done
        _log.info("checking %s: %d of %d rows, about %s left", self._name, self._done, self._total, _duration(left))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _images(row: Row) -> Iterator[EncodedImage]:
    yield from row.images
    others = (row.mask, row.reference, row.target, row.chosen, row.rejected)
    yield from (image for image in others if image is not None)


class _Decoded:
    """The problems of one row that are found by decoding its images."""

    def __init__(self, row: Row, max_pixels: int) -> None:
        self.problems: list[Problem] = []
        self.keys: list[str] = []
        self.pixels: list[str] = []  # the keys of all images, with that of the mask
        self.region: Region | None = None
        self._row = row
        self._max_pixels = max_pixels
        images = [self._image(image) for image in row.images]
        target = self._image(row.target)
        self._image(row.reference)
        source = images[0] if images else None
        pair = self._image(row.chosen), self._image(row.rejected)
        mask = self._mask(row.mask, source or target)
        self._pair(*pair)
        self.pixels += [*self.keys, *([] if mask is None else [content_key(b"mask", mask.tobytes())])]
        canvas = source or target or pair[0]
        if canvas is not None:
            edited = None
            if source is not None and target is not None and source.size == target.size:
                edited = ImageChops.difference(source, target).convert("L").point(lambda change: 255 * (change > _CHANGED))
            region = mask or edited
            self.region = (*canvas.size, *((0.0, 0.0) if region is None else off_centre(region)))
        if source is not None and target is not None and target.width * source.height != target.height * source.width:
            shapes = f"{target.width}x{target.height} but its source {source.width}x{source.height}"
            self._add(f"the target is {shapes}: resizing crops them to one aspect ratio", "note")

    def _add(self, what: str, severity: Literal["error", "note"]) -> None:
        self.problems.append(Problem(self._row.file, self._row.line, what, severity))

    def _image(self, encoded: EncodedImage | None) -> Image.Image | None:
        if encoded is None:
            return None
        try:
            header = read_header(encoded, max_pixels=self._max_pixels)
            image = load_image(encoded, max_pixels=self._max_pixels)
        except ValueError as error:
            self._add(str(error), "error")
            return None
        if header.rotated:
            self._add(f"{encoded.name}: rotated as its EXIF says", "note")
        if header.profile == "converted":
            self._add(f"{encoded.name}: has a colour profile, converted to sRGB", "note")
        if header.profile == "unusable":
            self._add(f"{encoded.name}: its colour profile is damaged or of other colours, and is not applied", "note")
        if header.mode != "RGB":
            self._add(f"{encoded.name}: mode {header.mode}, read as RGB", "note")
        self.keys.append(content_key(repr(image.size).encode(), image.tobytes()))
        return image

    def _pair(self, chosen: Image.Image | None, rejected: Image.Image | None) -> None:
        if chosen is None or rejected is None:
            return
        if chosen.size == rejected.size and chosen.tobytes() == rejected.tobytes():
            self._add("the chosen and the rejected image are the same, so there is nothing to prefer; remove the row", "error")
        if chosen.width * rejected.height != rejected.width * chosen.height:
            shapes = f"{chosen.width}x{chosen.height} and the rejected one {rejected.width}x{rejected.height}"
            self._add(f"the chosen image is {shapes}: resizing crops them to one aspect ratio", "note")

    def _mask(self, encoded: EncodedImage | None, canvas: Image.Image | None) -> Image.Image | None:
        if encoded is None:
            return None
        try:
            mask = load_mask(encoded, max_pixels=self._max_pixels)
            if canvas is not None:
                require_same_size(mask.size, canvas.size)
        except ValueError as error:
            self._add(str(error), "error")
            return None
        values = [value for _, value in mask.getcolors() or ()]
        if values == [0]:
            self._add("the mask is all black: nothing should change", "note")
        elif not set(values) <= {0, 255}:
            self._add(f"the mask has {len(values)} grey levels, not only black and white", "note")
        return mask
