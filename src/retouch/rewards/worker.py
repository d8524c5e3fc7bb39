"""A thread that runs calls in order, and that a process can abandon if a call never ends."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ABANDONED = "abandoned"
_log = logging.getLogger(__name__)


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
        import torch

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
        on_gpu = str(device).startswith("cuda")
        self._side_stream: Callable[[], AbstractContextManager[None]] = SideStream(device) if on_gpu else nullcontext
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
