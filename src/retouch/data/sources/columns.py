"""Finds the column of a data set that contains each field of a row."""

import difflib
from collections.abc import Mapping, Sequence

from retouch.config.imports import nearest
from retouch.data.rows import FIELDS, Problem


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
    notes = [
        Problem(file, 0, f"the key {key!r} {_kept(key, near_name)}goes to meta; should it be {near_name!r}?", "note")
        for key in keys
        if key not in found.values() and (near_name := _near_name(key, known)) is not None
    ]
    return found, notes


def _near_name(key: str, names: Sequence[str]) -> str | None:
    """The name that ``key`` equals up to upper and lower case, else a very similar name; None if there is none."""
    same = [name for name in names if name.lower() == key.lower()]
    return next(iter(same or difflib.get_close_matches(key, names, n=1, cutoff=0.85)), None)


def _kept(key: str, near: str) -> str:
    return f"is read as an ordinary column, not as {near!r}, and " if key.lower() == near.lower() else ""
