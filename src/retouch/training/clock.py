"""Wall-clock time of the stages of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Sums wall-clock seconds by stage until they are taken.

    ``stage``: the stage that is running, or that ended with an exception.
    """

    stage: str | None = None
    _spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.stage, started = stage, time.perf_counter()
        try:
            yield
        finally:
            self._spent[stage] = self._spent.get(stage, 0.0) + time.perf_counter() - started
        self.stage = None

    def take(self) -> dict[str, float]:
        """Seconds by ``time/<stage>`` since the last call."""
        spent, self._spent = self._spent, {}
        return {f"time/{stage}": seconds for stage, seconds in spent.items()}
