"""The tasks of a stream. Another process reads and decodes them before the step that needs them."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch.utils.data

from retouch.data.images import Resize
from retouch.data.rows import Row
from retouch.data.sampler import LoadedTasks
from retouch.data.streaming.streams import Cursor, StreamOrder
from retouch.data.tasks import load_task
from retouch.types import Task

_THREADS = 4  # decoding and resizing release the interpreter's lock
_AHEAD_IN_PROCESS = 2 * _THREADS
_TRIES = 100
_STOP_SECONDS = 10.0
_PARENT_POLL = 0.5
_RAISED = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamItem:
    """The task at a position of the order, or the text of the error that loading it raised. ``cursor``: the start of its window."""

    position: int
    cursor: Cursor
    task: Task | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()


class StepTasks(LoadedTasks):
    """The tasks of a step, indexed by their place in the step; only those that this rank has loaded can be accessed."""

    def __init__(self, count: int, tasks: Mapping[int, Task]) -> None:
        self._count = count
        self._tasks = tasks

    def __len__(self) -> int:
        return self._count

    def load(self, index: int) -> Task:
        return self._tasks[index]


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

    def stop(self) -> None:
        """Wait for the thread for at most ``_STOP_SECONDS``."""
        self.thread.join(_STOP_SECONDS)

    def _take(self, items: Iterator[StreamItem], count: int) -> None:
        try:
            self._found += islice(items, count)
        except _RAISED as error:  # the process was killed, or a function of the user's stream raised an error in the process
            self._error = error


class TaskStream:
    """The training tasks of a stream, for ``retouch.data.sampler.draw``.

    ``first``: tasks from the start of the stream, used as examples. ``ahead``: the number of steps whose tasks another process
    loads in advance; 0 loads the tasks in this process when the step begins. ``skip``: skip rows that cannot be decoded.
    ``waited``: the seconds that steps have waited for their tasks.
    """

    def __init__(
        self, order: StreamOrder, *, resize: Resize | None, first: Sequence[Task], ahead: int = 2, skip: bool = False
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
        self._last: tuple[tuple[int, int, tuple[int, ...]], StepTasks] | None = None

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
        self._last = wanted, StepTasks(count, found)
        self._forget(wanted[0])
        self.waited += time.monotonic() - start
        return self._last[1]

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores: the place in the stream, and the number of its shards."""
        newest = max(position for position in self._cursors if self._last is None or position <= self._last[0][0])
        return {"shards": self._order.reader.shards, "cursor": self._cursors[newest].to_json()}

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
            coming.stop()

    def _forget(self, position: int) -> None:
        for old in sorted(place for place in self._cursors if 0 < place <= position)[:-8]:
            del self._cursors[old]

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
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    asked: list[int] = []

    def end(number: int, frame: object) -> None:
        if asked:
            os._exit(0)
        asked.append(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)


def _end_with(parent: int) -> None:
    """End this process once its parent has ended. Otherwise a process that writes to a full pipe without a reader would never
    end."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL)
    os._exit(1)


class _LoadedRows(torch.utils.data.IterableDataset[StreamItem]):
    """The tasks at ``places`` of each step, from the row ``position`` on, without end. If the stream cannot be read, the last item
    has the error."""

    def __init__(
        self,
        order: StreamOrder,
        resize: Resize | None,
        cursor: Cursor,
        position: int,
        count: int,
        places: tuple[int, ...],
        skip: bool,
    ) -> None:
        self._order = order
        self._resize = resize
        self._cursor = cursor
        self._start = position
        self._count = count
        self._places = frozenset(places)
        self._skip = skip

    def __iter__(self) -> Iterator[StreamItem]:
        pending: deque[Future[StreamItem]] = deque()
        begin = self._cursor
        with ThreadPoolExecutor(_THREADS) as threads:
            try:
                for begin, rows in self._order.windows(self._cursor, least=self._count):
                    for number in range(len(rows)):
                        position = begin.position + number
                        if position >= self._start and (position - self._start) % self._count in self._places:
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
                task = load_task(rows[place % len(rows)], resize=self._resize)
            except ValueError as error:
                warnings.append(str(error))
                if not self._skip:
                    break
                continue
            return StreamItem(begin.position + number, begin, task, warnings=tuple(warnings))
        advice = "fix the row, or leave unusable rows out with data.on_bad_row: 'skip'"
        return StreamItem(begin.position + number, begin, error=f"{warnings[-1]}; {advice}")
