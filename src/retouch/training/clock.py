"""Time of the stages of a step: on the GPU where one computes, elsewhere by the wall clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


class Event(Protocol):
    """A point in a GPU's queue of kernels, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Add the point to the queue."""
        ...

    def query(self) -> bool:
        """Whether the GPU has reached it. Does not wait."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds to another point that has been reached."""
        ...


@dataclass
class Clock:
    """Sums the seconds of each stage until they are taken.

    A GPU computes later than the host asks, so the host's clock would count the end of a rollout as rendering, which waits for it.
    ``event``: makes the points in the GPU's queue between which a stage is measured; None is the host's clock. Nothing waits for
    the GPU: a stage that it has not finished when times are taken counts in the next step.

    ``stage``: the stage that is running, or that ended with an exception.
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
        """Seconds by ``time/<stage>`` since the last call."""
        # A GPU finishes stages in order.
        while self._pending and self._pending[0][2].query():
            stage, start, end = self._pending.pop(0)
            self._add(stage, start.elapsed_time(end) / 1000)
        spent, self._spent = self._spent, {}
        return {f"time/{stage}": seconds for stage, seconds in spent.items()}
