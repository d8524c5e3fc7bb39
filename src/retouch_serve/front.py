"""Limits on connections that hold before a request is authenticated: time, size and number of headers, open connections, log lines.

uvicorn limits none of these. ``BoundedProtocol`` adds the limits to uvicorn's httptools protocol, and ``Connections`` counts the
open connections.
"""

import asyncio
import contextlib
import ctypes
import functools
import json
import logging
import resource
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from retouch_serve.wire import ERRORS, ErrorCode, RequestError

_LONGEST = 4000  # characters of a message, and of a traceback
_MOST_KINDS = 500


@dataclass(slots=True)
class _Bucket:
    """A token bucket. ``left``: records that may still be written, at the time ``at``. ``dropped``: records not written."""

    left: float
    at: float
    dropped: int = 0


class BoundedRate(logging.Filter):
    """Passes ``burst`` records of a kind (logger and message without its arguments), and then ``per_minute`` records per minute.

    The limit for all kinds together is ten times as high. A record that passes after others were dropped reports their number. Long
    messages and tracebacks are truncated.
    """

    def __init__(self, *, burst: int = 20, per_minute: float = 20.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._burst, self._per_minute, self._clock = burst, per_minute, clock
        self._kinds: dict[tuple[str, str], _Bucket] = {}
        self._all = _Bucket(10.0 * burst, clock())

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        now = self._clock()
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        bucket = self._kinds.setdefault((record.name, str(record.msg)[:200]), _Bucket(self._burst, now))
        own = self._refill(bucket, now, self._burst, self._per_minute)
        every = self._refill(self._all, now, 10 * self._burst, 10 * self._per_minute)
        if own < 1 or every < 1:
            bucket.dropped += 1
            return False
        bucket.left -= 1
        self._all.left -= 1
        text = record.getMessage()[:_LONGEST]
        if bucket.dropped:
            text += f" (and {bucket.dropped} more since the last line of this kind)"
            bucket.dropped = 0
        record.msg, record.args = text, None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)[-_LONGEST:]
        return True

    @staticmethod
    def _refill(bucket: _Bucket, now: float, most: float, per_minute: float) -> float:
        bucket.left = min(most, bucket.left + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        return bucket.left


BACKLOG = 128
_RESERVE = 64 + 2 * BACKLOG  # file descriptors for logs, models, and connections that are accepted but not yet counted
_MOST_DESCRIPTORS = 65536
_LINGER_SECONDS = 10.0  # time for which the rest of an unread body is received and discarded, so that its sender can read the reply
_WRITE_SECONDS = 30.0  # time for a client to read the rest of its reply
_BODY_PER_FRAMING = 8  # minimum bytes of a body for each byte of framing, so that chunks have 40 bytes or more
_PIECE = 4096  # minimum bytes of a body that the application gets at once, except at its end
_MOST_PIPELINED = 8  # requests that wait for the reply to an earlier request on the same connection


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Sizes are in bytes, times in seconds.

    ``max_connections``: open connections; fewer if the process may not open so many files. ``max_headers`` and
    ``max_header_bytes``: headers of one request. ``header_seconds``: time for them to arrive. ``body_seconds`` and
    ``min_body_rate``: time for a body to arrive, and bytes for which it may take one second more. ``max_memory_bytes``: bodies of
    all requests together.
    """

    max_connections: int = 1024
    max_headers: int = 100
    max_header_bytes: int = 65536
    header_seconds: float = 10.0
    body_seconds: float = 10.0
    min_body_rate: float = 2**19
    max_memory_bytes: int = 2**30


def bounded_config(app: Any, limits: FrontLimits, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration of a server with these limits on connections, which logs at a bounded rate. ``options``:
    further options of ``uvicorn.Config``."""
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, BoundedRate) for each in log.filters):
        log.addFilter(BoundedRate())
    connections = Connections(min(limits.max_connections, _free_descriptors()))
    protocol: Any = functools.partial(BoundedProtocol, limits=limits, connections=connections)
    fixed: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False, "ws": "none"}
    return uvicorn.Config(app, http=protocol, backlog=BACKLOG, **fixed, **options)


class Connections:
    """The open connections, at most ``most``. If all are in use, a new connection replaces the oldest one that waits for its client
    or that has sent several requests at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[BoundedProtocol] = set()
        self._waiting: dict[BoundedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: "BoundedProtocol") -> bool:
        """Count a new connection. Returns False if there is no room, because all connections have a request in progress."""
        if len(self._open) >= self.most:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.closed(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        self.waits(connection, waiting=True)
        return True

    def waits(self, connection: "BoundedProtocol", *, waiting: bool) -> None:
        """Record whether the connection waits for its client: for the rest of a request, or until the client reads the reply."""
        self._waiting.pop(connection, None)
        if waiting and connection in self._open:
            self._waiting[connection] = None

    def closed(self, connection: "BoundedProtocol") -> None:
        """Record that the connection is closed."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class _Refused(Exception):
    """Raised in a callback of the parser, which reports it as an invalid request."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits.

    The headers of a request must arrive within ``header_seconds`` after the connection or after their first byte, and have at most
    ``max_headers`` lines and ``max_header_bytes`` bytes. A request that exceeds a limit gets a reply with a fixed text, and the
    connection is closed. If a body continues after the reply, it is discarded for 10 s. A client that reads nothing of its reply
    for 30 s loses the connection.
    """

    def __init__(self, *arguments: Any, limits: FrontLimits, connections: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits, self._counted = limits, connections
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refusal: ErrorCode = "bad_request"
        self._header_lines = self._header_bytes = 0
        self._overhead = self._body_bytes = 0  # bytes of the current request: outside its body, and in its body
        self._expecting = self._in_request = self._receiving = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._counted.opened(self):
            self._expect_headers()
        else:
            self._refuse("busy")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_by(None)
        self._stop_waiting_for_reader()
        self._counted.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._in_request and not self._expecting:
            self._expect_headers()
        self._overhead += len(data)
        super().data_received(data)
        if (
            self._overhead > self._limits.max_header_bytes + self._body_bytes // _BODY_PER_FRAMING
            and not self.transport.is_closing()
        ):
            self._refuse("headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_lines = self._header_bytes = 0
        self._receiving = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_lines += 1
        self._header_bytes += len(name) + len(value)
        if self._header_lines > self._limits.max_headers or self._header_bytes > self._limits.max_header_bytes:
            self._refusal = "headers_too_large"
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _Refused
        self._end_by(None)
        self._in_request, self._expecting = True, False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        self._body_bytes += len(body)
        if len(self.cycle.body) + len(body) < _PIECE and not self.cycle.response_complete:
            self.cycle.body += body  # without waking the application, which would cost far more than sending a byte
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._overhead = self._body_bytes = 0
        if self.cycle.response_complete and not self.pipeline:
            self._idle()
        else:
            self._counted.waits(self, waiting=bool(self.pipeline))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_by(_WRITE_SECONDS)
        elif self._receiving:
            self._counted.waits(self, waiting=True)
            self._end_by(_LINGER_SECONDS)
        elif self.cycle.response_complete:
            self._idle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_WRITE_SECONDS, self.transport.abort)
        self._counted.waits(self, waiting=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()
        self._counted.waits(self, waiting=self._receiving or not self._in_request)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_by(_WRITE_SECONDS)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _idle(self) -> None:
        """Wait for the next request, after the reply and the whole body; uvicorn closes the connection if no request follows."""
        self._in_request = False
        # This timer is needed in addition to uvicorn's: uvicorn cancels its timer when the end of a body arrives after the reply.
        self._end_by(self.timeout_keep_alive + _WRITE_SECONDS)
        self._counted.waits(self, waiting=True)

    def _expect_headers(self) -> None:
        self._end_by(None)
        self._expecting = True
        self._deadline = self.loop.call_later(self._limits.header_seconds, self._refuse, "too_slow")

    def _refuse(self, code: ErrorCode) -> None:
        """Reply with the error and close the connection. If a reply is already being sent, only close the connection."""
        if self.transport.is_closing():
            return
        if not self._in_request or not self.cycle.response_started:
            status, text = ERRORS[code]
            body = json.dumps({"error": {"code": code, "message": text}}).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
        self._end_by(_WRITE_SECONDS)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def _end_by(self, seconds: float | None) -> None:
        """Abort the connection after ``seconds``. This replaces the previous deadline; None only removes it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def _free_descriptors() -> int:
    """Raise the limit of file descriptors as far as allowed, and return how many connections this process can open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _MOST_DESCRIPTORS
    own = Path("/proc/self/fd")
    return max(1, soft - _RESERVE - (len(list(own.iterdir())) if own.is_dir() else 64))


BYTES_PER_PIXEL = 4
"""Bytes per pixel of a decoded RGB image, as Pillow stores it."""
DECODING_BYTES = 12
"""Additional bytes per pixel while an image is decoded: a canvas with transparency, its copy, and the converted image."""
_TRIM_BYTES = 64 * 2**20


class MemoryBudget:
    """A budget of at most ``most`` bytes that are reserved at the same time. Several threads and finalizers may use it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = self._peak = 0
        self._lock = threading.Lock()
        # Finalizers run in any thread at any point, also inside the lock, so they only append here.
        self._released: deque[int] = deque()

    @property
    def held(self) -> int:
        """The number of bytes that are currently reserved."""
        with self._lock:
            return self._settle()

    def hold(self, count: int) -> None:
        """Reserve ``count`` more bytes. Raises RequestError ("busy") if the budget does not suffice."""
        with self._lock:
            if self._settle() + count > self._most:
                raise RequestError("busy")
            self._held += count
            self._peak = max(self._peak, self._held)

    def release(self, count: int) -> None:
        """Release ``count`` reserved bytes."""
        self._released.append(count)

    @contextlib.contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Reserve ``count`` bytes for the duration of the block. Raises RequestError ("busy") if the budget does not suffice."""
        self.hold(count)
        try:
            yield
        finally:
            self.release(count)

    def release_with(self, image: Image.Image, count: int) -> None:
        """Release ``count`` bytes when the image is garbage-collected."""
        weakref.finalize(image, self.release, count).atexit = False

    def trim(self) -> bool:
        """Return freed memory to the operating system if at least 64 MiB were freed since the last time; returns whether it did."""
        with self._lock:
            held = self._settle()
            if self._peak - held < _TRIM_BYTES:
                return False
            self._peak = held
        with contextlib.suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        return True

    def _settle(self) -> int:
        while self._released:
            self._held -= self._released.popleft()
        return self._held


_PROMPT_SECONDS = 1.0


class Bodies:
    """The memory of all bodies of a server. ``slow``: of the bodies that are still arriving after 1 s."""

    def __init__(self, limits: FrontLimits) -> None:
        self.limits = limits
        self.memory = MemoryBudget(limits.max_memory_bytes)
        self.slow = MemoryBudget(limits.max_memory_bytes // 2)


class Body:
    """The body of one request. Its memory is reserved until ``release``."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = self._held_slowly = 0
        self._is_slow = False

    async def read(self, request: Request, *, max_bytes: int) -> bytes:
        """Read the body. At any time, it may have taken ``body_seconds``, and 1 s for each ``min_body_rate`` bytes that arrived.
        Raises RequestError if the body is compressed, is larger than ``max_bytes``, arrives too slowly, or if no memory is left."""
        limits = self._bodies.limits
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise RequestError("unsupported")
        stated = request.headers.get("content-length", "0")
        if not stated.isascii() or not stated.isdigit() or len(stated) > 18:
            raise RequestError("bad_body")
        if int(stated) > max_bytes:
            raise RequestError("too_large")
        content = bytearray()
        loop = asyncio.get_running_loop()
        latest = loop.time() + limits.body_seconds
        deadline = asyncio.timeout_at(latest)
        slow = loop.call_later(_PROMPT_SECONDS, self.becomes_slow, deadline)
        try:
            async with deadline:
                async for part in request.stream():
                    if len(content) + len(part) > max_bytes:
                        raise RequestError("too_large")
                    if self._is_slow:
                        self._bodies.slow.hold(len(part))
                        self._held_slowly += len(part)
                    self._bodies.memory.hold(len(part))
                    self._held += len(part)
                    content += part
                    deadline.reschedule(latest + len(content) / limits.min_body_rate)
        except TimeoutError:
            raise RequestError("too_slow") from None
        except ClientDisconnect:
            raise RequestError("bad_body") from None
        finally:
            slow.cancel()
            self._bodies.slow.release(self._held_slowly)
        return bytes(content)

    def becomes_slow(self, deadline: asyncio.Timeout) -> None:
        """Count the body among the slow ones. If their memory does not suffice, it is given up at once."""
        self._is_slow = True
        try:
            self._bodies.slow.hold(self._held)
        except RequestError:
            deadline.reschedule(asyncio.get_running_loop().time())
        else:
            self._held_slowly = self._held

    def release(self) -> None:
        """Release the memory."""
        self._bodies.memory.release(self._held)
        self._held = 0
