"""SIGINT (Ctrl-C) and SIGTERM ask a run to stop at the end of its step, on all ranks, with a checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """``signal``: the first signal received, or None. A second Ctrl-C stops the process at once, as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code of a process that a signal ended: 128 + its number (SIGTERM if another rank received it)."""
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Catch the first SIGINT or SIGTERM inside the block."""
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
