"""Local HTTP servers for doubles: they log nothing and stop at the end of the block that starts them."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def body(self) -> bytes:
        """Return the whole body of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, content: object, headers: Mapping[str, str] = {}, *, cut: bool = False) -> None:
        """Send ``content``: bytes unchanged, anything else as JSON. ``cut``: the connection ends after half of it."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut

    def reset(self) -> None:
        """Close the connection so that the client's system reports a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, handler: type[Handler], *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client closed the connection


def free_port() -> int:
    """Return a port at which nothing listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


AnyServer = TypeVar("AnyServer", bound=Server)


@contextmanager
def running(server: AnyServer) -> Iterator[AnyServer]:
    """Serve in another thread until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Answer = tuple[int, object] | tuple[int, object, Mapping[str, str]] | None
"""The status, the content and the headers of a reply. None: the connection is closed without a reply."""


class _ScriptedHandler(Handler):
    server: "Scripted"

    def do_GET(self) -> None:
        request = Request(self.command, self.path, self.headers, self.body())
        self.server.requests.append(request)
        answer = self.server.answer(request)
        if answer is None:
            self.close_connection = True
        else:
            self.reply(*answer)

    do_POST = do_GET


class Scripted(Server):
    """Answers each request with ``answer(request)`` and records the requests."""

    def __init__(self, answer: Callable[[Request], Answer], *, port: int = 0) -> None:
        super().__init__(_ScriptedHandler, port=port)
        self.answer = answer
        self.requests: list[Request] = []


def scripted(answer: Callable[[Request], Answer], *, port: int = 0) -> AbstractContextManager[Scripted]:
    return running(Scripted(answer, port=port))
