"""The split into training and held-out rows. All rows that share an image are on the same side.

The side of a source depends on a hash of the seed and the name of the source, so adding rows does not move existing rows.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from retouch.core.random import generator


@dataclass(frozen=True, slots=True)
class Split:
    """The row numbers of both sides, ascending. Every row is on exactly one side."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def split_by_source(sources: Sequence[str], *, held_out: float | int | Literal["all"], seed: int) -> Split:
    """Split rows by their ``sources``, one for each row. Split before rows are repeated.

    ``held_out``: a float below 1 is the probability that a source is held out, independent of the other sources. A whole number is
    the smallest number of held-out rows: the sources with the lowest hashes are held out, so added rows may replace held-out rows.
    "all" holds out every row.

    Raises ValueError if a side is empty, except for the held-out side with ``held_out`` 0 and the training side with "all".
    """
    if held_out == "all":
        return Split((), tuple(range(len(sources))))
    if held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"held_out {held_out} must be a share from 0 to below 1, a number of rows, or 'all' to only evaluate")
    places = {source: _uniform(seed, source) for source in set(sources)}
    if isinstance(held_out, float):
        away = {source for source, place in places.items() if place < held_out}
    else:
        away, count, sizes = set[str](), 0, Counter(sources)
        for source in sorted(places, key=lambda source: (places[source], source)):
            if count >= held_out:
                break
            away.add(source)
            count += sizes[source]
    split = Split(
        tuple(row for row, source in enumerate(sources) if source not in away),
        tuple(row for row, source in enumerate(sources) if source in away),
    )
    if not split.train or (held_out and not split.held_out):
        side = "train on" if not split.train else "hold out"
        evaluate = "; to evaluate on every row without training, set held_out: 'all'" if not split.train else ""
        raise ValueError(
            f"held_out {held_out} leaves nothing to {side}: the {len(sources)} rows have {len(places)} different source images (or "
            "prompts), and rows of one stay together; add rows, or hold out a number of rows in place of a share, as held_out: 1"
            f"{evaluate}"
        )
    return split


def grouped(sources: Sequence[str], keys: Sequence[Collection[str]]) -> list[str]:
    """The source of each row, such that rows which share a source or a key have one source: the first of theirs in the order of
    names. ``keys``: those of each row, such as its images."""
    parents = list(range(len(sources)))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = row = parents[parents[row]]
        return row

    first: dict[tuple[str, str], int] = {}
    for row, source in enumerate(sources):
        for key in (("source", source), *(("key", key) for key in keys[row])):
            parents[root(row)] = root(first.setdefault(key, row))
    names: dict[int, str] = {}
    for row, source in enumerate(sources):
        names[root(row)] = min(source, names.get(root(row), source))
    return [names[root(row)] for row in range(len(sources))]


def limit(indices: Sequence[int], *, n: int, seed: int) -> tuple[int, ...]:
    """``n`` of the indices, drawn without replacement, in their original order; all indices if there are at most ``n``.

    With the same seed, the indices drawn for a smaller ``n`` are a subset of those for a larger ``n``. Raises ValueError if
    ``n`` < 1.
    """
    if n < 1:
        raise ValueError(f"a limit of {n} rows leaves nothing; use at least 1")
    import torch

    order = torch.randperm(len(indices), generator=generator(seed, "limit")).tolist()
    return tuple(indices[place] for place in sorted(order[:n]))


def _uniform(seed: int, source: str) -> float:
    """A hash of the seed and the source, as a number in [0, 1)."""
    digest = hashlib.sha256(f"{seed}/{source}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
