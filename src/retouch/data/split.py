"""Which rows train and which are held out, decided by the source picture, so that no picture stands on both sides.

Each source has a place of its own, a hash of the seed and its name, so rows that are added later move no row that was there.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retouch.core.random import generator


@dataclass(frozen=True, slots=True)
class Split:
    """Row numbers, ascending; together they are all rows."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def split_by_source(sources: Sequence[str], *, held_out: float | int, seed: int) -> Split:
    """Splits rows by their sources (one a row): what comes from one source stays on one side. Split before rows are multiplied.

    ``held_out``: a share of the sources (a float below 1; each source falls with that probability, whatever else there is), or at
    least so many rows (an integer; the sources of the lowest hashes, so rows that are added may push others out). ValueError
    where a side comes out empty; only ``held_out`` 0 may leave the held-out side so.
    """
    if held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"held_out {held_out} must be a share from 0 to below 1, or a number of rows")
    places = {source: _place(seed, source) for source in set(sources)}
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
        raise ValueError(
            f"held_out {held_out} leaves nothing to {side}: {len(sources)} rows come from {len(places)} sources; "
            "give another number of rows"
        )
    return split


def limit(indices: Sequence[int], *, n: int, seed: int) -> tuple[int, ...]:
    """``n`` of the indices drawn without replacement, in their order; all where there are no more. A larger n keeps a smaller's."""
    if n < 1:
        raise ValueError(f"a limit of {n} rows leaves nothing; use at least 1")
    order = torch.randperm(len(indices), generator=generator(seed, "limit")).tolist()
    return tuple(indices[place] for place in sorted(order[:n]))


def _place(seed: int, source: str) -> float:
    """Uniform in [0, 1)."""
    digest = hashlib.sha256(f"{seed}/{source}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
