"""Finds the problems of a data set by reading every row and every pixel, as training does.

Training calls ``accept_rows`` before its first step, so that no row turns out to be bad later. The result is stored for later
starts (``stored_check.py``).
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from retouch.data.images import MAX_PIXELS, Resize
from retouch.data.requirements import CheckedShare, RequiredRows, RowRequirements
from retouch.data.rows import InvalidRow, Problem, Rows
from retouch.data.split import grouped

OnBadRow: TypeAlias = Literal["refuse", "skip"]
SHOWN = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AcceptedRows:
    """The rows that a run uses. ``indices``: their numbers, ascending. ``sources``: the source of each of them, for
    ``split_by_source``; rows that share any image have one source. ``keys``: of the images of each of them. ``problems``: the
    problems of all rows of the data set."""

    indices: tuple[int, ...]
    sources: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    problems: tuple[Problem, ...]
    contents: Mapping[int, str]


def accept(rows: Rows, *, on_bad_row: OnBadRow) -> tuple[tuple[int, ...], list[Problem]]:
    """The indices of the usable rows, and all problems that were found. Raises ValueError under the same conditions as
    ``accept_rows``."""
    found = accept_rows(rows, on_bad_row=on_bad_row)
    return found.indices, list(found.problems)


def accept_rows(
    rows: Rows,
    *,
    on_bad_row: OnBadRow,
    required: RowRequirements | None = None,
    check: CheckedShare = "all",
    seed: int = 0,
    resize: Resize | None = None,
) -> AcceptedRows:
    """The usable rows of a data set.

    ``required``: what every row must have. ``check``: the rows whose images are decoded: "all", the "first" ones, or this number of
    rows, drawn with ``seed``; all other rows are only read. ``resize``: how their images are resized; a row whose mask this would
    crop away is bad, and rows that lose much of their images are logged.

    ``on_bad_row``: "refuse" raises ValueError if any row is bad; the message has the number of bad rows, and the first few of them
    by file and line. "skip" leaves bad rows out and logs them. Both raise ValueError if no row is left.
    """
    if on_bad_row not in ("refuse", "skip"):
        raise ValueError(f'on_bad_row must be "refuse" or "skip", not {on_bad_row!r}')
    from retouch.data.stored_check import checked_rows

    checked = checked_rows(rows, check=check, seed=seed)
    complete = None if required is None else RequiredRows(rows, required)
    problems, good, errors = list(rows.problems), [], []
    for index, found in checked.findings(resize):
        if complete is not None and required is not None and checked.lacks(index, required):
            found = _lacking(complete, index)
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
    cropped = [problem for problem in problems if problem.severity == "note" and problem.what.startswith("the crop of")]
    if cropped:
        _log.warning(
            "%d of %d rows are cropped to less than half, or lose what they change:\n%s", len(cropped), len(rows), cropped[0]
        )
    if errors:
        _log.warning("skipped %d of %d rows:\n%s", len(errors), len(rows), "\n".join(str(problem) for problem in errors))
    keys = tuple(checked.keys.get(index, ()) for index in good)
    sources = grouped([checked.sources[index] or checked.ids[index] for index in good], keys)
    return AcceptedRows(tuple(good), tuple(sources), keys, tuple(problems), {index: checked.contents[index] for index in good})


def _lacking(rows: RequiredRows, index: int) -> list[Problem]:
    try:
        rows[index]
    except InvalidRow as bad:
        return list(bad.problems)
    raise AssertionError("CheckedRows.lacks and RequiredRows disagree")


def find_problems(rows: Rows, *, max_pixels: int = MAX_PIXELS, resize: Resize | None = None) -> Iterator[tuple[int, list[Problem]]]:
    """The index and the problems of each row, in order. If an id is repeated, the later row has the error."""
    from retouch.data.stored_check import checked_rows

    yield from checked_rows(rows, max_pixels=max_pixels).findings(resize)
