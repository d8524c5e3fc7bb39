"""Splits the rows of a batch into requests to a server: each has one task, consecutive slots, and the seed of its first slot."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from retouch.types import Batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskRows:
    """``count`` consecutive rows of the batch, which belong to task number ``task`` and have the slots from ``slot`` on."""

    task: int
    slot: int
    count: int


def consecutive_rows(batch: Batch, *, most: int | None = None) -> list[TaskRows]:
    """The rows of the batch, split where the task changes, where slots are not consecutive, and after ``most`` rows."""
    found: list[TaskRows] = []
    for task, slot in zip(batch.group, batch.slot, strict=True):
        last = found[-1] if found else None
        if last is not None and task == last.task and slot == last.slot + last.count and last.count != most:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(TaskRows(task, slot, count=1))
    return found


def group_seed(batch: Batch, group: int, engine: str) -> int:
    """The seed of slot 0 of a group; slot k adds k. It has 62 bits, because servers accept non-negative seeds below 2**63."""
    key = hashlib.sha256(repr((batch.seed, engine, batch.step, group)).encode()).digest()
    return int.from_bytes(key[:8], "big") >> 2


def concurrently(ask: Callable[[TaskRows], Sequence[T]], requests: Sequence[TaskRows], *, most: int) -> list[T]:
    """The results of ``ask`` in the order of the requests, with at most ``most`` at a time. An error cancels the other requests."""
    with ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(ask, rows) for rows in requests]
        try:
            return [one for future in futures for one in future.result()]
        finally:
            pool.shutdown(cancel_futures=True)
