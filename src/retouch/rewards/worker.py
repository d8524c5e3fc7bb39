"""A thread that runs calls in order, and that a process can abandon if a call never ends; and the settings of the process that
no call may change."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from sys import exception
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ABANDONED = "abandoned"
_log = logging.getLogger(__name__)
_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the current folder": (os.getcwd, os.chdir),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's deterministic debug mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, lambda value: setattr(torch.backends.cudnn, "benchmark", value)),
}
_lock = threading.Lock()
_running: list[Callable[[], str]] = []
_before: dict[str, Any] = {}
"""The settings before the first of the running calls."""
_reported: list[str] = []


class SideStream:
    """A second CUDA stream, so that a judge does not wait for the rollouts and updates on the same GPU.

    The work in a ``with`` block runs on this stream, after all work that was submitted to the default stream before the first
    block was entered, for example the loading of weights. Results are complete at the end of the block. Without a GPU as
    ``device``, the block has no effect.
    """

    def __init__(self, device: "torch.device | str | None") -> None:
        self._device = str(device)
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._device.startswith("cuda"):
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


class WorkerThread:
    """A ThreadPoolExecutor with one thread, except that neither ``close`` nor the end of the process waits forever for the thread.

    ``device``: the calls run on a separate stream of this GPU (``SideStream``).
    """

    def __init__(self, name: str, *, device: "torch.device | str | None" = None) -> None:
        self.name = name
        self._side_stream = SideStream(device)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, call: Callable[..., T], *args: Any) -> "Future[T]":
        """Run ``call(*args)`` after all calls that were submitted before, and return its future. Raises RuntimeError after
        ``close``."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread {self.name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._calls.put((future, lambda: call(*args)))
        return future

    def close(self, *, seconds: float) -> bool:
        """Cancel the calls that have not begun, and wait up to ``seconds`` for the running call. Returns False if that call did not
        end; the thread is then abandoned."""
        with self._lock:
            self._closed = True
            while not self._calls.empty():
                waiting = self._calls.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
            self._calls.put(None)
        if self._thread is None:
            return True
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._thread.name = f"{ABANDONED} {self.name}"
            return False
        return True

    def _run(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with self._side_stream():
                    result = call()
            except BaseException as error:  # noqa: BLE001  (the future raises it)
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, call, waiting


def close_all(threads: "list[WorkerThread]", *, seconds: float) -> bool:
    """Close the threads within ``seconds`` in total. Returns False and logs a warning if a thread was abandoned."""
    end = time.monotonic() + seconds
    ended = [thread.close(seconds=max(0.1, end - time.monotonic())) for thread in threads]
    if not all(ended):
        _log.warning("a call of a reward has not ended; its thread is abandoned")
    return all(ended)


def has_abandoned_threads() -> bool:
    """Whether this process abandoned a thread. The normal exit of the interpreter may then wait for it, so exit with
    ``os._exit``."""
    return any(thread.name.startswith(ABANDONED) for thread in threading.enumerate())


# The settings of the process that a run depends on. A reward runs in a thread of the run, next to the rollouts: if it changes the
# current folder or the default dtype, the run writes elsewhere, or its own code fails with an error that does not name the reward.


@contextmanager
def unchanged_settings(label: Callable[[], str]) -> Iterator[None]:
    """Raise ValueError if a setting is another one after the block, a call of a reward; it is set back first.

    ``label``: returns the reward's name for the message.

    If calls of several rewards overlap, the message names all that may have changed it. torch's gradient mode and default device,
    which belong to the thread, are only set back.
    """
    outer, device = exception(), torch.get_default_device()
    with _lock:
        if not _running:
            _before.update(_settings())
        _running.append(label)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        with _lock:
            text = _set_back()
            _running.remove(label)
        if text:
            error = exception()
            raise ValueError(text if error is outer else f"{text}\n  it then raised {type(error).__name__}: {error}")


@contextmanager
def explained_by_settings() -> Iterator[None]:
    """Name the cause of an error that ends the block, a run, after a reward changed a setting in the background."""
    outer = exception()
    _reported.clear()
    try:
        yield
    finally:
        error = exception()
        if error is not outer and isinstance(error, Exception):
            with _lock:
                _set_back()
            if _reported and not any(text in str(error) for text in _reported):
                raise ValueError(f"{_reported[-1]}\n  the run then failed with {type(error).__name__}: {error}") from error


def _settings() -> dict[str, Any]:
    """The present settings, without those that cannot be read: a deleted folder, a precision that is set in two ways."""
    found = {}
    for name, (read, _) in _SETTINGS.items():
        with suppress(OSError, RuntimeError):
            found[name] = read()
    return found


def _set_back() -> str:
    """Set back what differs from ``_before`` while a reward is running. Returns the message for the user, empty if nothing does."""
    now, changes = _settings(), []
    for name, value in _before.items() if _running else ():
        if now.get(name) != value:
            _SETTINGS[name][1](value)
            changes.append(f"{name} from {value} to {now.get(name, 'one that cannot be read')}")
    if not changes:
        return ""
    names = list(dict.fromkeys(label() for label in _running))
    who = names[0] if len(names) == 1 else f"one of {' and '.join(names)}, which ran at the same time,"
    text = f"{who} changed {' and '.join(changes)}, which the whole process shares; set it back before the reward returns"
    _reported.append(text)
    return text
