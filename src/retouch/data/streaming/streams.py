"""The order of the rows of a stream. It depends only on the data and the seed, and can be resumed at any row.

A stream consists of shards, each of which is read from its first row to its last (``datasets.IterableDataset``). Each pass reads
the shards in an order keyed by (seed, pass). The rows are cut into windows of a fixed number of rows, and the order within a window
is keyed by (seed, pass, window). Rows are numbered consecutively through all passes; row p of this order is the task ``p % count``
of step ``p // count``.

A cursor is the place where a window begins. Reading from any earlier cursor gives the same rows; a cursor close to the wanted row
only saves reading. So a checkpoint stores one cursor, which depends neither on the number of ranks nor on the rows read ahead.
"""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retouch.core.random import generator
from retouch.data.requirements import RequiredRows, RowRequirements
from retouch.data.rows import InvalidRow, Layout, Problem, PromptRows, Row, split_keys

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place where a window begins.

    ``position``: the number of the window's first row in the order of all passes. ``turn``: the pass, from 0. ``window``: the
    number of the window in the pass. ``place``: the number of shards of the pass before the window's first shard. ``row``: the
    number of rows of that shard before the window. ``state``: the state of the shard's reader, for the ``datasets`` library; None
    at the start of a shard. ``found``: the number of training rows of the pass before the window.
    """

    position: int = 0
    turn: int = 0
    window: int = 0
    place: int = 0
    row: int = 0
    state: Any = None
    found: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        """The cursor that ``to_json`` stored. Raises ValueError for any other value."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError("the checkpoint's place in the stream cannot be read; use another checkpoint")
        if any(type(value[name]) is not int or value[name] < 0 for name in names - {"state"}):
            raise ValueError("the checkpoint's place in the stream cannot be read; use another checkpoint")
        return cls(**value)


@dataclass(frozen=True)
class StreamReader:
    """Reads the rows of a stream, shard by shard.

    ``dataset``: the stream, whose images are not decoded. ``layout``: how its columns are read. ``required``: what every row must
    have. ``shards``: the number of parts that the stream is split into; 1 reads it as a whole. ``skip``: leave out rows that cannot
    be read, instead of raising ValueError. ``excluded``: the keys of the held-out rows
    (``split_keys``); rows with one of them are left out.
    """

    dataset: datasets.IterableDataset
    layout: Layout
    required: RowRequirements
    shards: int = 1
    skip: bool = False
    excluded: frozenset[str] = frozenset()

    def rows(self, shard: int, *, row: int = 0, state: Any = None) -> Iterator[tuple[int, Row | None, Any]]:
        """For each row of a shard: its number in the shard from 1, the row (None if it is left out), and a function that returns
        the state of the reader after this row.

        ``row`` and ``state``: the number of the last row that was already read, and the state after it. Raises ValueError for a row
        or a shard that cannot be read.
        """
        name = f"{self.layout.file}, shard {shard}" if self.shards > 1 else self.layout.file
        layout = dataclasses.replace(self.layout, file=name, name=f"{self.layout.name}/{shard}")
        part = self.dataset.shard(num_shards=self.shards, index=shard)
        if state is not None:
            part.load_state_dict(state)
        for number, fields in enumerate(_readable(part, name), start=row + 1):
            fields.pop("__url__", None)  # the shard's file in a WebDataset, which is not a property of the row
            yield number, self._parse(fields, layout, number), part.state_dict

    def _parse(self, fields: dict[str, Any], layout: Layout, number: int) -> Row | None:
        try:
            row = RequiredRows(PromptRows(_OneRow(fields, layout, number)), self.required)[0]
        except InvalidRow as bad:
            if self.skip:
                return None
            advice = "fix the row, or leave unusable rows out with data.on_bad_row: 'skip'"
            raise ValueError(f"{bad.problems[0]}; {advice}") from None
        return row if self.excluded.isdisjoint(split_keys(row)) else None


class _OneRow:
    """The fields of one row, with the interface of ``Rows``."""

    problems: tuple[Problem, ...] = ()

    def __init__(self, fields: dict[str, Any], layout: Layout, line: int) -> None:
        self._given = fields, layout, line

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Row:
        fields, layout, line = self._given
        return layout.parse(fields, line=line)


class RowList:
    """Rows in memory, with encoded images."""

    problems: tuple[Problem, ...] = ()

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


@dataclass(frozen=True)
class StreamOrder:
    """The rows of all passes over a stream, in the order in which they are drawn. ``window``: the number of rows that are shuffled
    together."""

    reader: StreamReader
    seed: int
    window: int

    def windows(self, start: Cursor, *, least: int = 1) -> Iterator[tuple[Cursor, list[Row]]]:
        """The windows from ``start`` on, without end, each with its rows in shuffled order.

        Raises ValueError after a pass with fewer than ``least`` rows, and for a row or a shard that cannot be read.
        """
        import torch

        cursor = start
        while True:
            shards = torch.randperm(self.reader.shards, generator=generator(self.seed, "shards", cursor.turn)).tolist()
            for begin, rows in self._pass(cursor, shards):
                order = torch.randperm(len(rows), generator=generator(self.seed, "stream", begin.turn, begin.window)).tolist()
                yield begin, [rows[place] for place in order]
                cursor = dataclasses.replace(begin, position=begin.position + len(rows), found=begin.found + len(rows))
            if cursor.found < least:
                raise ValueError(
                    f"{self.reader.layout.file}: the stream has {cursor.found} rows for training, and a step draws {least} tasks; "
                    "give more rows, or a smaller tasks_per_step"
                )
            cursor = Cursor(position=cursor.position, turn=cursor.turn + 1)

    def _pass(self, start: Cursor, shards: Sequence[int]) -> Iterator[tuple[Cursor, list[Row]]]:
        """The remaining windows of a pass, with rows in the order of the stream. The last window may have fewer rows."""
        begin, rows = start, list[Row]()
        for place in range(start.place, len(shards)):
            first = place == start.place
            read = self.reader.rows(shards[place], row=start.row if first else 0, state=start.state if first else None)
            for number, row, state in read:
                if row is not None:
                    rows.append(row)
                if len(rows) == self.window:
                    yield begin, rows
                    after = begin.position + len(rows), begin.turn, begin.window + 1
                    begin, rows = Cursor(*after, place, number, _plain(state()), begin.found + len(rows)), []
        if rows:
            yield begin, rows


def _plain(state: Any) -> Any:
    """The state of a reader as JSON."""
    if isinstance(state, dict):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state if state is None or isinstance(state, bool | int | float | str) else int(state)


def _readable(part: datasets.IterableDataset, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a shard. Raises ValueError, with the name of the shard, if it cannot be read."""
    unreadable = (OSError, EOFError, tarfile.TarError, ValueError, TypeError)
    try:
        yield from part
    except unreadable as error:
        reason = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{name}: cannot be read ({type(error).__name__}: {''.join(reason)[:200]}); get the file again, or check the connection"
        ) from error


def first_rows(reader: StreamReader) -> Iterator[Row]:
    """The usable rows of the stream in the order of its files."""
    for shard in range(reader.shards):
        for _, row, _ in reader.rows(shard):
            if row is not None:
                yield row
