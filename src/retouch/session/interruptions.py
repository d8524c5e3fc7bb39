"""Interruptions of a run: SIGINT (Ctrl-C), SIGTERM and SIGHUP, which stop it at the end of a step, a full disk, and a device out
of memory."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import torch

from retouch.recipe.recipe import Recipe

_ANSWER = "stopping after this step; a second signal stops at once, and the run then continues from its last checkpoint"


@dataclass
class StopRequest:
    """Whether the run was asked to stop. ``signal``: the first signal received, or None. A second Ctrl-C stops the process at once.

    ``asked``: the event that is set when the run is asked to stop. It also limits the wait for rewards (``Ranks.stop``).
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
        """The exit code after a stop: 128 + the number of the signal (SIGTERM if this rank received no signal)."""
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def catch_stop_signals(request: StopRequest, *, answer: bool) -> Iterator[None]:
    """Treat the first SIGINT, SIGTERM or SIGHUP inside the block as a request to stop. An ignored SIGHUP (nohup) stays ignored.

    ``answer``: print a line to stderr when the signal arrives, because a step may take minutes.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        request.stop()
        for each in numbers:
            signal.signal(each, before[each])
        if answer:
            # Not through a stream or a logger: the signal may have interrupted a write to it.
            with suppress(OSError):
                os.write(2, f"{signal.Signals(number).name}: {_ANSWER}\n".encode())

    before = {each: signal.signal(each, note) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def explain_full_disk(recipe: Recipe) -> Iterator[None]:
    """Turn an OSError of a full disk into ValueError, which says what to do; a library's error may name no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = error.filename or recipe.folder
        raise ValueError(f"{where}: {error.strerror}; free some space and run the same command again") from error


@contextmanager
def explain_out_of_memory(recipe: Recipe, stage: Callable[[], str]) -> Iterator[None]:
    """Turn torch's OutOfMemoryError into OutOfMemory, which names the recipe keys to change. ``stage``: what the run is doing."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        from retouch.recipe.derived.out_of_memory import explained

        raise explained(recipe, stage(), str(error)) from error
