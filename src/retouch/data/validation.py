"""Finds the problems of a data set by reading every row and every pixel, as training would.

Training calls ``accept`` before its first step, so that it meets no bad row later.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

from PIL import Image

from retouch.data.images import MAX_PIXELS, EncodedImage, load_image, load_mask, read_header
from retouch.data.rows import BadRow, Problem, Row, Rows
from retouch.data.tasks import require_same_size

OnBadRow: TypeAlias = Literal["refuse", "skip"]
SHOWN = 5
_THREADS = 8  # decoding releases the interpreter's lock
_BLOCK = 256  # rows whose encoded images may be in memory at once

_log = logging.getLogger(__name__)


def accept(rows: Rows, *, on_bad_row: OnBadRow) -> tuple[tuple[int, ...], list[Problem]]:
    """The indices of the usable rows, and all problems found.

    "refuse" raises ValueError if any row is bad, with the number of bad rows and the first few by file and line. "skip" leaves bad
    rows out and logs them. Both raise ValueError when no row is left.
    """
    if on_bad_row not in ("refuse", "skip"):
        raise ValueError(f'on_bad_row must be "refuse" or "skip", not {on_bad_row!r}')
    problems, good, errors = list(rows.problems), [], []
    for index, found in find_problems(rows):
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
            'Fix them (`retouch data check` lists all of them), or leave them out with data.on_bad_row: "skip".'
        )
    if not good:
        raise ValueError("no rows to train on")
    if errors:
        _log.warning("skipped %d of %d rows:\n%s", len(errors), len(rows), "\n".join(str(problem) for problem in errors))
    return tuple(good), problems


def find_problems(rows: Rows, *, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[int, list[Problem]]]:
    """The index and the problems of each row, in order. A repeated id is an error of the later row."""
    indices = range(len(rows))
    seen: dict[str, str] = {}

    def examine(index: int) -> tuple[Row | None, list[Problem]]:
        try:
            row = rows[index]
        except BadRow as bad:
            return None, list(bad.problems)
        return row, _Examined(row, max_pixels).problems

    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(indices), _BLOCK):
            block = indices[start : start + _BLOCK]
            for index, (row, found) in zip(block, pool.map(examine, block), strict=True):
                place = "" if row is None else f"{row.file}:{row.line}"
                if row is not None and seen.setdefault(row.id, place) != place:
                    found.insert(0, Problem(row.file, row.line, f"the id {row.id!r} is taken by {seen[row.id]}"))
                yield index, found


class _Examined:
    """The problems of one row, found by decoding its images."""

    def __init__(self, row: Row, max_pixels: int) -> None:
        self.problems: list[Problem] = []
        self._row = row
        self._max_pixels = max_pixels
        images = [self._image(image) for image in row.images]
        target = self._image(row.target)
        self._image(row.reference)
        self._mask(row.mask, images[0] if images else target)
        self._pair(self._image(row.chosen), self._image(row.rejected))
        source = images[0] if images else None
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
        if header.mode != "RGB":
            self._add(f"{encoded.name}: mode {header.mode}, read as RGB", "note")
        return image

    def _pair(self, chosen: Image.Image | None, rejected: Image.Image | None) -> None:
        if chosen is None or rejected is None:
            return
        if chosen.size == rejected.size and chosen.tobytes() == rejected.tobytes():
            self._add("the chosen and the rejected image are the same, so there is nothing to prefer; remove the row", "error")
        if chosen.width * rejected.height != rejected.width * chosen.height:
            shapes = f"{chosen.width}x{chosen.height} and the rejected one {rejected.width}x{rejected.height}"
            self._add(f"the chosen image is {shapes}: resizing crops them to one aspect ratio", "note")

    def _mask(self, encoded: EncodedImage | None, canvas: Image.Image | None) -> None:
        if encoded is None:
            return
        try:
            mask = load_mask(encoded, max_pixels=self._max_pixels)
            if canvas is not None:
                require_same_size(mask.size, canvas.size)
        except ValueError as error:
            self._add(str(error), "error")
            return
        values = [value for _, value in mask.getcolors() or ()]
        if values == [0]:
            self._add("the mask is all black: nothing should change", "note")
        elif not set(values) <= {0, 255}:
            self._add(f"the mask has {len(values)} grey levels, not only black and white", "note")
