"""Data sets that are read while the run trains: the order of their rows, and loading in another process before the step needs them.

The order depends only on the data and the seed, and can be resumed at any row. A stream consists of shards, each of which is read
from its first row to its last (``datasets.IterableDataset``). Each pass reads the shards in an order keyed by (seed, pass). Rows
are cut into windows of a fixed number of rows, and the order within a window is keyed by (seed, pass, window). Rows are numbered
consecutively through all passes; row p of this order is the task ``p % count`` of step ``p // count``.

A cursor is the place where a window begins. Reading from any earlier cursor gives the same rows; a cursor close to the wanted row
only saves reading. So a checkpoint stores one cursor, which depends neither on the number of ranks nor on the rows read ahead.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import tarfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.utils.data

from retouch.core.random import permutation
from retouch.data.rows import InvalidRow, Layout, Problem, Row, RowRequirements, split_keys, with_quoted_text
from retouch.data.tasks import LoadedTasks, load_task
from retouch.types import Task

if TYPE_CHECKING:
    import datasets

_THREADS = 4  # decoding and resizing release the interpreter's lock
_AHEAD_IN_PROCESS = 2 * _THREADS
_TRIES = 100
_STOP_SECONDS = 10.0
_PARENT_POLL = 0.5
_RAISED = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_log = logging.getLogger(__name__)


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

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        """The cursor that a checkpoint stored. Raises ValueError for any other value."""
        names = {field.name for field in dataclasses.fields(cls)}
        counts = names - {"state"}
        if isinstance(value, dict) and value.keys() == names and all(type(value[one]) is int and value[one] >= 0 for one in counts):
            return cls(**value)
        raise ValueError("the checkpoint's place in the stream cannot be read; use another checkpoint")


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
            found: Row | None = None
            try:
                found = self.required.checked(with_quoted_text(layout.parse(fields, line=number)))
            except InvalidRow as bad:
                if not self.skip:
                    advice = "fix the row, or leave unusable rows out with data.on_bad_row: 'skip'"
                    raise ValueError(f"{bad.problems[0]}; {advice}") from None
            if found is not None and not self.excluded.isdisjoint(split_keys(found)):
                found = None
            yield number, found, part.state_dict


class RowList(list[Row]):
    """Rows in memory, with encoded images."""

    problems: tuple[Problem, ...] = ()


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
        cursor = start
        while True:
            shards = permutation(self.reader.shards, self.seed, "shards", cursor.turn)
            for begin, rows in self._pass(cursor, shards):
                order = permutation(len(rows), self.seed, "stream", begin.turn, begin.window)
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


@dataclass(frozen=True, slots=True)
class StreamItem:
    """The task at a position of the order, or the text of the error that loading it raised. ``cursor``: the start of its window."""

    position: int
    cursor: Cursor
    task: Task | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()


class _NextItems:
    """The next items of an iterator, which another thread takes."""

    def __init__(self, items: Iterator[StreamItem], count: int) -> None:
        self._found: list[StreamItem] = []
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._take, args=(items, count), name="stream-items", daemon=True)
        self.thread.start()

    def result(self) -> list[StreamItem]:
        """The items; fewer than ``count`` if the last one is an error. Raises the error that the iterator raised."""
        self.thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _take(self, items: Iterator[StreamItem], count: int) -> None:
        try:
            self._found += islice(items, count)
        except _RAISED as error:  # the process was killed, or a function of the user's stream raised an error in the process
            self._error = error


class TaskStream:
    """The training tasks of a stream, for ``retouch.data.tasks.draw``.

    ``first``: tasks from the start of the stream, used as examples. ``ahead``: the number of steps whose tasks another process
    loads in advance; 0 loads the tasks in this process when the step begins. ``skip``: skip rows that cannot be decoded.
    ``waited``: the seconds that steps have waited for their tasks.
    """

    def __init__(
        self, order: StreamOrder, *, resize: tuple[int, int] | None, first: Sequence[Task], ahead: int = 2, skip: bool = False
    ) -> None:
        self.first = first
        self.waited = 0.0
        self._order = order
        self._resize = resize
        self._ahead = ahead
        self._skip = skip
        self._cursors = {0: Cursor()}
        self._items: Iterator[StreamItem] | None = None
        self._coming: _NextItems | None = None
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._next: tuple[int, int, tuple[int, ...]] | None = None
        self._last: tuple[tuple[int, int, tuple[int, ...]], LoadedTasks] | None = None

    def at_step(self, step: int, *, count: int, places: Sequence[int]) -> Sequence[Task]:
        """The tasks of a step: rows ``step * count`` to ``(step + 1) * count - 1`` of the order. Only those at ``places`` are
        loaded.

        Raises ValueError for a row or a shard that cannot be read.
        """
        wanted = (step * count, count, tuple(places))
        if self._last is not None and self._last[0] == wanted:
            return self._last[1]
        start = time.monotonic()
        if self._next != wanted or self._items is None:
            self._items = self._start(*wanted)
        coming, self._coming = self._coming, None
        items = list(islice(self._items, len(places))) if coming is None else coming.result()
        found = {}
        for place, drawn in zip(places, items, strict=False):
            for warning in drawn.warnings:
                _log.warning("skipped an unusable row, and took another one: %s", warning)
            if drawn.task is None:
                self.close()
                raise ValueError(drawn.error)
            assert drawn.position == wanted[0] + place, f"row {drawn.position} came in place of {wanted[0] + place}"
            self._cursors[drawn.cursor.position] = drawn.cursor
            found[place] = drawn.task
        assert len(found) == len(places), "only an error ends the stream"
        self._next = (wanted[0] + count, count, wanted[2])
        if self._ahead:
            self._coming = _NextItems(self._items, len(places))  # they are copied from the other process while the step computes
            self._threads.add(self._coming.thread)
        self._last = wanted, LoadedTasks(count, found.__getitem__)  # only the tasks of this rank
        for old in sorted(place for place in self._cursors if 0 < place <= wanted[0])[:-8]:
            del self._cursors[old]
        self.waited += time.monotonic() - start
        return self._last[1]

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores: the place in the stream, and the number of its shards."""
        newest = max(position for position in self._cursors if self._last is None or position <= self._last[0][0])
        return {"shards": self._order.reader.shards, "cursor": dataclasses.asdict(self._cursors[newest])}

    def load_state(self, state: Any) -> None:
        """Continue from the result of ``state``. Raises ValueError if the number of shards has changed."""
        shards = state.get("shards") if isinstance(state, dict) else None
        if shards != self._order.reader.shards:
            raise ValueError(
                f"{self._order.reader.layout.file}: the stream has {self._order.reader.shards} shards, and had {shards} when the "
                "checkpoint was written, so the rows that were drawn are not known; restore the data, or start over with --fresh"
            )
        cursor = Cursor.from_json(state["cursor"])
        self._cursors[cursor.position] = cursor

    def close(self) -> None:
        """Stop the process that reads ahead."""
        coming, self._coming = self._coming, None
        self._items, self._next = None, None
        if coming is not None:
            coming.thread.join(_STOP_SECONDS)

    def _start(self, position: int, count: int, places: tuple[int, ...]) -> Iterator[StreamItem]:
        self.close()
        cursor = self._cursors[max(place for place in self._cursors if place <= position)]
        rows = _LoadedRows(self._order, self._resize, cursor, position, count, places, self._skip)
        if not self._ahead:
            return iter(rows)
        # Only one worker, because each worker reads the whole stream. The cursor is the state, so no StatefulDataLoader is needed.
        loader = torch.utils.data.DataLoader(
            rows,
            batch_size=None,
            num_workers=1,
            prefetch_factor=self._ahead * len(places),
            worker_init_fn=partial(_set_up_process, os.getpid()),
            generator=torch.Generator(),  # otherwise the loader draws from the global generator of the run
        )
        others = set(multiprocessing.active_children())
        items = iter(loader)
        atexit.register(_end, weakref.ref(self), self._threads, set(multiprocessing.active_children()) - others)
        return items


def _end(
    held: weakref.ref[TaskStream],
    threads: Iterable[threading.Thread],
    processes: Iterable[multiprocessing.process.BaseProcess],
) -> None:
    """Called at the exit of the interpreter: ends the processes, which ignore the first SIGTERM, and the threads, which may outlive
    the stream.

    A thread that still executes torch code while the interpreter exits aborts the process ("terminate called without an active
    exception").
    """
    running = list(threads)
    for thread in running:
        thread.join(_STOP_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    for thread in running:  # threads that waited for the process
        thread.join(_STOP_SECONDS)
    stream = held()
    if stream is not None:
        stream.close()


def _set_up_process(parent: int, worker: int) -> None:
    """Set up the process that reads ahead: it ends when the process ``parent`` ends, and ignores Ctrl-C and the first SIGTERM.

    Ctrl-C and the SIGTERM of a cluster reach all processes of a run, and the run may still have to finish its step. The second
    SIGTERM comes from the data loader.
    """

    def watch_parent() -> None:  # a process that writes to a full pipe without a reader would never end
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()
    asked: list[int] = []

    def end(number: int, frame: object) -> None:
        if asked:
            os._exit(0)
        asked.append(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)


@dataclass(frozen=True, eq=False)
class _LoadedRows(torch.utils.data.IterableDataset[StreamItem]):
    """The tasks at ``places`` of each step, from the row ``start`` on, without end. If the stream cannot be read, the last item
    has the error."""

    order: StreamOrder
    resize: tuple[int, int] | None
    cursor: Cursor
    start: int
    count: int
    places: tuple[int, ...]
    skip: bool

    def __iter__(self) -> Iterator[StreamItem]:
        pending: deque[Future[StreamItem]] = deque()
        begin = self.cursor
        with ThreadPoolExecutor(_THREADS) as threads:
            try:
                for begin, rows in self.order.windows(self.cursor, least=self.count):
                    for number in range(len(rows)):
                        position = begin.position + number
                        if position >= self.start and (position - self.start) % self.count in self.places:
                            pending.append(threads.submit(self._load, begin, rows, number))
                            if len(pending) == _AHEAD_IN_PROCESS:
                                yield pending.popleft().result()
            except ValueError as error:
                while pending:
                    yield pending.popleft().result()
                yield StreamItem(-1, begin, error=str(error))

    def _load(self, begin: Cursor, rows: Sequence[Row], number: int) -> StreamItem:
        """The task of a row. If the row cannot be decoded and bad rows are skipped: the task of the next row of the window that can
        be decoded."""
        warnings: list[str] = []
        for place in range(number, number + min(len(rows), _TRIES)):
            try:
                task = load_task(rows[place % len(rows)], resize=self.resize)
            except ValueError as error:
                warnings.append(str(error))
                if not self.skip:
                    break
                continue
            return StreamItem(begin.position + number, begin, task, warnings=tuple(warnings))
        advice = "fix the row, or leave unusable rows out with data.on_bad_row: 'skip'"
        return StreamItem(begin.position + number, begin, error=f"{warnings[-1]}; {advice}")
