"""Reads a data set as training would, every row and every pixel, and lists all that is wrong with it.

``check`` is for people; ``accept`` is what training calls before its first step, so that no bad row is met in the middle.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeAlias

from PIL import Image

from retouch.data.images import MAX_PIXELS, Picture, load_image, load_mask, read_header
from retouch.data.problems import BadRow, Problem
from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import METADATA, read_folder
from retouch.data.sources.prompts import read_prompts
from retouch.data.sources.tokens import LIST as TOKENS
from retouch.data.sources.tokens import TokenRows
from retouch.data.sources.triplets import LIST, TripletRows
from retouch.data.tasks import require_same_size

OnBadRow: TypeAlias = Literal["refuse", "skip"]
SHOWN = 5
_THREADS = 8  # decoding runs outside the interpreter's lock
_BLOCK = 256  # rows whose encoded pictures may be in memory at once

_log = logging.getLogger(__name__)


def check(source: str | Path | Rows, *, max_pixels: int = MAX_PIXELS) -> list[Problem]:
    """Everything that is wrong with a data set, and notes on how it is read: the file's, then row by row.

    ``source``: rows, or a path as ``read_path`` takes it. Errors: a line that is not JSON (or CSV, or UTF-8), a missing
    instruction, a repeated id, a picture that is missing, damaged, too large, of another format or outside the folder, a mask
    of another size than its image. Notes: a byte-order mark, CRLF, keys that look mistyped, pictures that are not RGB or are
    turned by EXIF, a mask that is empty or not black and white, a target of another shape than its source.
    """
    if isinstance(source, str | Path):
        try:
            source = read_path(source)
        except ValueError as error:
            return [Problem(str(source), 0, str(error))]
    return [*source.problems, *(problem for _, found in _examine(source, range(len(source)), max_pixels) for problem in found)]


def read_path(path: str | Path) -> Rows:
    """Rows by what lies there: a folder with metadata, triplets or image tokens, a prompt list, else what ``datasets`` reads."""
    where = Path(path)
    if not where.exists():
        raise ValueError(f"{path}: no such file or folder")
    if any((where / name).is_file() for name in METADATA):
        return read_folder(where)
    if (where / LIST).is_file():
        return TripletRows(where, reference="own")
    if (where / TOKENS).is_file() or where.name == Path(TOKENS).name:
        return TokenRows([where], trusted=False)
    if where.suffix in (".txt", ".jsonl"):
        return read_prompts(where)
    from retouch.data.sources.hub import read_hub  # slow to import

    return read_hub(where)


def accept(
    rows: Rows, *, on_bad_row: OnBadRow, among: Sequence[int] | None = None, max_pixels: int = MAX_PIXELS
) -> tuple[tuple[int, ...], list[Problem]]:
    """The indices of the rows that can be trained on, of ``among`` (by default all), and all problems found.

    "refuse": ValueError if any row is bad, with their number and the first few by file and line. "skip": bad rows are left out,
    counted and listed in the log. Either way ValueError when no row is left.
    """
    if on_bad_row not in ("refuse", "skip"):
        raise ValueError(f'on_bad_row must be "refuse" or "skip", not {on_bad_row!r}')
    problems, good, errors = list(rows.problems), [], []
    chosen = range(len(rows)) if among is None else among
    for index, found in _examine(rows, chosen, max_pixels):
        problems += found
        wrong = [problem for problem in found if problem.severity == "error"]
        errors += wrong[:1]
        if not wrong:
            good.append(index)
    if errors and (on_bad_row == "refuse" or not good):
        shown = "\n".join(f"  {problem}" for problem in errors[:SHOWN])
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise ValueError(
            f"{len(errors)} of {len(chosen)} rows cannot be used:\n{shown}{more}\n"
            'Mend them (`retouch data check` lists all), or leave them out with data.on_bad_row: "skip".'
        )
    if not good:
        raise ValueError("no rows to train on")
    if errors:
        _log.warning("skipped %d of %d rows:\n%s", len(errors), len(chosen), "\n".join(str(problem) for problem in errors))
    return tuple(good), problems


def _examine(rows: Rows, indices: Sequence[int], max_pixels: int) -> Iterator[tuple[int, list[Problem]]]:
    """Each row's problems, in order. Of two rows with one id the later is wrong."""
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
    """One row with its pictures decoded, and what there is to say of them."""

    def __init__(self, row: Row, max_pixels: int) -> None:
        self.problems: list[Problem] = []
        self._row = row
        self._max_pixels = max_pixels
        images = [self._image(picture) for picture in row.images]
        target = self._image(row.target)
        self._image(row.reference)
        self._mask(row.mask, images[0] if images else target)
        source = images[0] if images else None
        if source is not None and target is not None and target.width * source.height != target.height * source.width:
            shapes = f"{target.width}x{target.height} but its source {source.width}x{source.height}"
            self._say(f"the target is {shapes}: cut to one shape where sizes are fitted", "note")

    def _say(self, what: str, severity: Literal["error", "note"]) -> None:
        self.problems.append(Problem(self._row.file, self._row.line, what, severity))

    def _image(self, picture: Picture | None) -> Image.Image | None:
        if picture is None:
            return None
        try:
            header = read_header(picture, max_pixels=self._max_pixels)
            image = load_image(picture, max_pixels=self._max_pixels)
        except ValueError as error:
            self._say(str(error), "error")
            return None
        if header.rotated:
            self._say(f"{picture.name}: turned upright as its EXIF says", "note")
        if header.mode != "RGB":
            self._say(f"{picture.name}: mode {header.mode}, read as RGB", "note")
        return image

    def _mask(self, picture: Picture | None, canvas: Image.Image | None) -> None:
        if picture is None:
            return
        try:
            mask = load_mask(picture, max_pixels=self._max_pixels)
            if canvas is not None:
                require_same_size(mask.size, canvas.size)
        except ValueError as error:
            self._say(str(error), "error")
            return
        values = [value for _, value in mask.getcolors() or ()]
        if values == [0]:
            self._say("the mask is all black: nothing is to change", "note")
        elif not set(values) <= {0, 255}:
            self._say(f"the mask has {len(values)} grey levels, not only black and white", "note")
