"""Ctrl-C and SIGTERM ask a run to stop; it does at the end of its step, on all ranks, with a checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """``signal``: the first one received, or None. A second Ctrl-C stops at once, as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code of a process that a signal ended: 128 + its number; SIGTERM's where another rank received it."""
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Catch the first SIGINT or SIGTERM while the block runs."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, before[each])

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
