"""The rows of a batch as requests to a server ask for them: one task, consecutive slots, and the seed of the first slot."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from retouch.types import Batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskRows:
    """``count`` consecutive rows of the batch: of task number ``task``, with slots from ``slot`` on."""

    task: int
    slot: int
    count: int


def consecutive_rows(batch: Batch, *, most: int | None = None) -> list[TaskRows]:
    """The rows, split where the task changes or the slots are not consecutive, and after ``most`` of them."""
    found: list[TaskRows] = []
    for task, slot in zip(batch.group, batch.slot, strict=True):
        last = found[-1] if found else None
        if last is not None and task == last.task and slot == last.slot + last.count and last.count != most:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(TaskRows(task, slot, count=1))
    return found


def group_seed(batch: Batch, group: int, engine: str) -> int:
    """The seed of slot 0 of a group; slot k adds k. 62 bits, since servers take 63 and no sign."""
    key = hashlib.sha256(repr((batch.seed, engine, batch.step, group)).encode()).digest()
    return int.from_bytes(key[:8], "big") >> 2


def concurrently(ask: Callable[[TaskRows], Sequence[T]], requests: Sequence[TaskRows], *, most: int) -> list[T]:
    """The results of ``ask`` in the order of the requests, at most ``most`` at a time. An error cancels the rest."""
    with ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(ask, rows) for rows in requests]
        try:
            return [one for future in futures for one in future.result()]
        finally:
            pool.shutdown(cancel_futures=True)
