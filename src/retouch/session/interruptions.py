"""What interrupts a run: SIGINT (Ctrl-C) and SIGTERM, which ask it to stop at the end of its step, and a device that is full."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from retouch.recipe.recipe import Recipe


class StopRequest:
    """``signal``: the first signal received, or None. A second Ctrl-C stops the process at once, as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked = False

    def stop(self) -> None:
        """Ask the run to stop at the end of its step, without a signal."""
        self._asked = True

    @property
    def pending(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked or self.signal is not None

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


@contextmanager
def explain_out_of_memory(recipe: Recipe, stage: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemory, with the keys of the recipe to change, if a device is full. ``stage``: what the run is doing."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        from retouch.recipe.out_of_memory import explained

        raise explained(recipe, stage(), str(error)) from error
