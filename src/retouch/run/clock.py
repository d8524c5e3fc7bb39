"""Times the stages of a step: with GPU events if the run computes on a GPU, otherwise with the host's clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


class Event(Protocol):
    """A point in a GPU's queue of kernels, like ``torch.cuda.Event``."""

    def record(self) -> None:
        """Add this point to the queue."""
        ...

    def query(self) -> bool:
        """Return whether the GPU has reached this point, without waiting for it."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds between this point and the later point ``end``; the GPU must have reached both."""
        ...


@dataclass
class Clock:
    """Sums the seconds of each stage until ``take`` is called.

    A GPU computes later than the host queues its kernels, so the host's clock would count the end of a rollout as part of the
    rendering, which waits for the rollout. ``event``: creates the points in the GPU's queue at which a stage starts and ends; None:
    use the host's clock. The clock never waits for the GPU: a stage that the GPU has not finished when ``take`` is called counts in
    the next step.

    ``stage``: the stage that is running, or the stage that ended with an exception.
    """

    event: Callable[[], Event] | None = None
    stage: str | None = None
    _spent: dict[str, float] = field(default_factory=dict)
    _pending: list[tuple[str, Event, Event]] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.stage, ended = stage, self._begin(stage)
        try:
            yield
        finally:
            ended()
        self.stage = None

    def _begin(self, stage: str) -> Callable[[], None]:
        if self.event is None:
            started = time.perf_counter()
            return lambda: self._add(stage, time.perf_counter() - started)
        start, end = self.event(), self.event()
        start.record()

        def ended() -> None:
            end.record()
            self._pending.append((stage, start, end))

        return ended

    def _add(self, stage: str, seconds: float) -> None:
        self._spent[stage] = self._spent.get(stage, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, with keys ``time/<stage>``."""
        # A GPU finishes stages in the order in which they were queued.
        while self._pending and self._pending[0][2].query():
            stage, start, end = self._pending.pop(0)
            self._add(stage, start.elapsed_time(end) / 1000)
        spent, self._spent = self._spent, {}
        return {f"time/{stage}": seconds for stage, seconds in spent.items()}
