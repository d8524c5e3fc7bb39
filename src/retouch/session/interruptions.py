"""What interrupts a run: SIGINT (Ctrl-C), SIGTERM and SIGHUP, which ask it to stop at the end of its step, and a full device."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from retouch.recipe.recipe import Recipe


@dataclass
class StopRequest:
    """``signal``: the first signal received, or None. A second Ctrl-C stops the process at once, as usual.

    ``asked``: the event that is set once the run was asked to stop, which ends waiting for rewards (``Ranks.stop``).
    """

    asked: threading.Event
    signal: int | None = None

    def stop(self) -> None:
        """Ask the run to stop at the end of its step, without a signal."""
        self.asked.set()

    @property
    def pending(self) -> bool:
        """Whether the run was asked to stop."""
        return self.asked.is_set()

    @property
    def code(self) -> int:
        """The exit code of a process that a signal ended: 128 + its number (SIGTERM if another rank received it)."""
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def catch_stop_signals(request: StopRequest) -> Iterator[None]:
    """Catch the first SIGINT, SIGTERM or SIGHUP inside the block as a request to stop. An ignored SIGHUP (nohup) stays ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        request.stop()
        for each in numbers:
            signal.signal(each, before[each])

    before = {each: signal.signal(each, note) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def explain_out_of_memory(recipe: Recipe, stage: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemory, with the keys of the recipe to change, if a device is full. ``stage``: what the run is doing."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        from retouch.recipe.derived.out_of_memory import explained

        raise explained(recipe, stage(), str(error)) from error
