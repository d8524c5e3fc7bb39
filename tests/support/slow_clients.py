"""Clients that try to make an HTTP server deaf: slow, endless, silent and malformed requests on many loopback connections."""

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

_RECONNECTIONS = 0.07  # of the connections per round; faster would be a flood
_ROUND = 0.1  # seconds
_GET = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n"
_NOWHERE = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
_POST = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Attack:
    """What each connection sends first, and then in each round. ``reads``: the client reads what the server sends.
    ``closes``: it closes its sending side after the first bytes. ``waits``: it reads a reply before the next connection opens."""

    first: bytes = b""
    then: bytes = b""
    reads: bool = True
    closes: bool = False
    waits: bool = False


ATTACKS = {
    "connections that send nothing": Attack(),
    "headers that never end": Attack(_GET + b"X-Slow: "),
    "headers of one byte at a time": Attack(_GET + b"X-Slow: ", b"a"),
    "a line of headers at a time": Attack(_GET, b"X-Slow: y\r\n"),
    "a huge header": Attack(_GET + b"X: ", b"a" * 200_000),
    "a huge request line": Attack(b"GET /", b"a" * 200_000),
    "many headers": Attack(_GET, b"X: y\r\n" * 2000),
    "slow bodies": Attack(_POST + b"Content-Length: 1000000\r\n\r\n{", b" "),
    "bodies that stop after 100 kB": Attack(_POST + b"Content-Length: 200000\r\n\r\n" + b" " * 100_000),
    "chunks of one byte": Attack(_POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 20),
    "100-continue without a body": Attack(_POST + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n"),
    "bodies that nobody asked for": Attack(_NOWHERE, b" " * 500),
    "requests whose replies are not read": Attack((_GET + b"\r\n") * 2, reads=False),
    "pipelined requests": Attack((_GET + b"\r\n") * 2000),
    "half-closed requests": Attack(b"GET /v1/info HT", closes=True),
    "half-closed bodies": Attack(_POST + b"Content-Length: 1000\r\n\r\n{", closes=True),
    "bytes that are not HTTP": Attack(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20),
    "idle connections after a request": Attack(_GET + b"\r\n", waits=True),
}


@contextmanager
def attacking(url: str, attack: Attack, count: int) -> Iterator[None]:
    """Keep ``count`` connections that attack the server at ``url`` for the duration of the block."""
    address = urlsplit(url)
    connections: list[socket.socket | None] = [None] * count
    stop, opened = threading.Event(), threading.Event()

    def open_one() -> socket.socket | None:
        try:
            made = socket.create_connection((address.hostname, address.port), timeout=2)
            made.settimeout(2)
            made.sendall(attack.first)
            if attack.closes:
                made.shutdown(socket.SHUT_WR)
            if attack.waits:
                made.recv(65536)
            made.setblocking(False)
        except OSError:
            return None
        return made

    def send_on(connection: socket.socket) -> bool:
        """Return whether the connection is still open."""
        try:
            if attack.then and not attack.closes:
                connection.send(attack.then)
        except BlockingIOError:
            pass
        except OSError:
            return False
        if not attack.reads:
            return True
        try:
            return connection.recv(65536) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def run() -> None:
        try:
            for number in range(count):
                connections[number] = open_one()
            opened.set()
            while not stop.wait(_ROUND):
                left = int(_RECONNECTIONS * count)
                for number, connection in enumerate(connections):
                    if connection is not None and send_on(connection):
                        continue
                    if connection is not None:
                        connection.close()
                        connections[number] = None
                    if left:
                        left -= 1
                        connections[number] = open_one()
        finally:
            for connection in connections:
                if connection is not None:
                    connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert opened.wait(120)
        yield
    finally:
        stop.set()
        thread.join()


def honest(ask: Callable[[], bool], count: int) -> tuple[int, float]:
    """Call ``ask`` ``count`` times; it returns whether it was answered. Returns the number of answers and the median seconds."""
    seconds, answered = [], 0
    for _ in range(count):
        began = time.monotonic()
        answered += ask()
        seconds.append(time.monotonic() - began)
    return answered, statistics.median(seconds)
