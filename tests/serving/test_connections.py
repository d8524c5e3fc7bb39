"""Limits for clients before authentication: connections, headers, Host names, log lines, and memory for images."""

import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from live_server import body_of, host, live, samples_of
from retouch_serve.front import BoundedRate, Connections, MemoryBudget
from retouch_serve.requests import Limits
from retouch_serve.wire import RequestError, encode_body
from served_rewards import Digest, WaitsForFile
from slow_params import slow_after

STRICT_LIMITS = Limits(window=0.0, max_connections=20, header_seconds=0.5, body_seconds=1.0)


@pytest.fixture(scope="module")
def strict():
    with live(host(Digest()), limits=STRICT_LIMITS) as server:
        yield server


def connect(server):
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def read_all(connection):
    """Everything until the server closes the connection, or resets it."""
    came = b""
    try:
        while part := connection.recv(65536):
            came += part
    except ConnectionError:
        pass
    return came


def status(reply):
    return int(reply.split(b" ", 2)[1]) if reply else 0


def answers(server, within=5.0):
    """Whether a client gets a page, over a connection of its own."""
    return httpx.get(f"{server.url}/livez", timeout=within).status_code == 200


@pytest.mark.parametrize(
    "start", slow_after(2, [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"G", b"POST /v1/score HTTP/1.1\r\n"])
)
def test_incomplete_headers_end_the_connection_with_408(strict, start):
    with connect(strict) as connection:
        connection.sendall(start)
        began = time.monotonic()
        assert status(read_all(connection)) == 408
        assert time.monotonic() - began < 10
    with connect(strict) as connection:  # also in a second request
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /livez HTTP/1.1\r\nHo")
        assert status(read_all(connection)) == 408


def test_slowly_sent_headers_do_not_extend_the_time_limit(strict):
    with connect(strict) as connection:
        stop = threading.Event()

        def drip():
            for byte in b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                if stop.wait(0.02):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert status(read_all(connection)) in (0, 408)  # 0: reset, since it went on writing
        finally:
            stop.set()
            thread.join()


def test_server_answers_despite_many_slow_connections():
    """Ten times as many slow connections as ``max_connections``; complete requests are still answered. No connection ends because
    its headers are late."""
    limits = replace(STRICT_LIMITS, header_seconds=600)
    with live(host(Digest()), limits=limits) as server, ExitStack() as stack:
        for _ in range(10 * limits.max_connections):
            stack.enter_context(connect(server)).sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert all(answers(server) for _ in range(5))


def test_a_connection_with_a_request_in_progress_is_not_replaced(tmp_path):
    gate = tmp_path / "gate"
    body, kind = body_of(samples_of(1))
    with live(host(WaitsForFile(str(gate))), limits=STRICT_LIMITS) as server, ThreadPoolExecutor() as pool, ExitStack() as stack:
        first = pool.submit(httpx.post, f"{server.url}/v1/score", content=body, headers=kind, timeout=60)
        while not server.service.call_seconds:
            time.sleep(0.01)
        for _ in range(3 * STRICT_LIMITS.max_connections):
            stack.enter_context(connect(server)).sendall(b"G")
        assert answers(server)
        gate.touch()
        assert first.result().status_code == 200


def test_new_connection_at_the_limit_replaces_a_waiting_one_or_is_refused():
    class Open:
        def __init__(self):
            self.transport = self
            self.aborted = False

        def abort(self):
            self.aborted = True

    counted = Connections(2)
    first, second, third = Open(), Open(), Open()
    assert counted.opened(first)
    assert counted.opened(second)
    counted.waits(first, waiting=False)
    assert counted.opened(third)  # in the place of the second, which waits
    assert (first.aborted, second.aborted, third.aborted) == (False, True, False)
    counted.waits(third, waiting=False)
    assert not counted.opened(Open())
    counted.closed(first)
    assert counted.opened(Open())
    assert len(counted) == 2


LONG = b"a" * 1000
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADERS: dict[str, Sequence[bytes]] = {
    "one header of 200 MB": [GET + b"X: ", *[LONG * 1000] * 200],
    "a name of 1 MB": [GET, LONG * 1000],
    "200 headers": [GET + b"X: y\r\n" * 200 + b"\r\n"],
    "a million headers": [GET, *[b"X: y\r\n" * 1000] * 1000],
    "a path of 1 MB": [b"GET /" + LONG * 1000],
    "headers of 80 kB": [GET + b"X: " + LONG * 80 + b"\r\n\r\n"],
    "folded headers": [GET + b"X: y\r\n" + b" z\r\n" * 50_000],
    "200 trailers": [b"POST /nowhere" + CHUNKED + b"1\r\nx\r\n0\r\n" + b"T: y\r\n" * 200 + b"\r\n"],
    "extensions of chunks": [b"POST /v1/score" + CHUNKED, *[b"1;" + LONG + b"\r\nx\r\n"] * 1000],
    "a method of 1 MB": [LONG * 1000],
}


@pytest.mark.parametrize("name", HEADERS)
def test_oversized_headers_are_rejected_early(strict, name):
    sent = 0
    with connect(strict) as connection:
        with suppress(OSError):
            for part in HEADERS[name]:
                connection.sendall(part)
                sent += len(part)
        assert status(read_all(connection)) in (0, 400, 404, 431)  # 0: reset, since it went on writing
    assert sent < 20e6
    assert answers(strict)


def test_connection_is_closed_if_the_body_continues_after_the_reply(strict, monkeypatch):
    monkeypatch.setattr("retouch_serve.front._LINGER_SECONDS", 0.5)
    with connect(strict) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        began = time.monotonic()
        with suppress(OSError):  # a reset or a broken pipe
            while time.monotonic() < began + 20:
                connection.sendall(bytes(1000))
                time.sleep(0.01)
        assert time.monotonic() - began < 10
    with httpx.Client(base_url=strict.url, trust_env=False) as client:  # a short body is read to its end
        for _ in range(3):
            assert client.post("/nowhere", content=bytes(2**20)).status_code == 404
            assert client.get("/livez").status_code == 200


def test_point_3_5_a_client_that_does_not_read_its_replies_loses_the_connection(strict, monkeypatch):
    monkeypatch.setattr("retouch_serve.front._WRITE_SECONDS", 0.5)
    with connect(strict) as connection:
        try:
            for _ in range(2000):
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                time.sleep(0.005)
        except ConnectionError:
            return
    raise AssertionError("the connection is still open")


def test_point_3_5_a_connection_may_have_few_requests_in_flight(strict):
    with connect(strict) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        assert read_all(connection).count(b"HTTP/1.1 200") <= 10


def test_point_3_5_slow_bodies_leave_room_for_requests_that_are_sent_at_once():
    """More bodies that stop halfway than there are requests in progress, with all of the memory for bodies."""
    sizes = {"max_pixels": 2**12, "max_total_pixels": 2**13, "max_body_bytes": 2**18, "max_memory_bytes": 5 * 2**18}
    head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: x/y\r\nContent-Length: {2**18}\r\n\r\n".encode()
    body, kind = body_of(samples_of(1))
    with live(host(Digest()), limits=Limits(window=0.0, max_requests=4, **sizes)) as server, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(server)).sendall(head + bytes(2**18 - 1))
        time.sleep(1.5)
        assert 0 < server.service.memory.held <= 2.5 * 2**18
        assert [httpx.post(f"{server.url}/v1/score", content=body, headers=kind).status_code for _ in range(10)] == [200] * 10


def test_point_3_5_the_time_for_a_body_grows_with_the_bytes_that_arrive():
    limits = replace(STRICT_LIMITS, header_seconds=5.0, body_seconds=0.5, min_body_rate=1000)
    body, kind = body_of(samples_of(1))
    lines = ("POST /v1/score HTTP/1.1", "Host: localhost", f"Content-Type: {kind['Content-Type']}", f"Content-Length: {len(body)}")
    with live(host(Digest()), limits=limits) as server:
        for first, expected in ((len(body) - 10, 200), (10, 408)):
            with connect(server) as connection:
                connection.sendall("\r\n".join([*lines, "", ""]).encode() + body[:first])
                time.sleep(1.0)
                connection.sendall(body[first:])
                assert status(connection.recv(65536)) == expected


@pytest.mark.parametrize(
    "headers",
    [
        *(f"Host: {name}" for name in ("evil.example", "evil.example:8700", "localhost.evil.example", "127.0.0.1.evil.example")),
        *(f"Host: {name}" for name in ("10.0.0.1", "[::2]", "", "[", "localhost\r\nHost: evil.example")),
        *(f"Host: localhost\r\nOrigin: {origin}" for origin in ("http://evil.example", "null")),
        "Host: localhost\r\nOrigin: http://localhost\r\nOrigin: http://evil.example",
    ],
)
def test_other_host_and_origin_headers_are_rejected_without_a_token(strict, headers):
    for line in ("GET /v1/info HTTP/1.1", "POST /v1/score HTTP/1.1", "GET /metrics HTTP/1.1", "GET /docs HTTP/1.1"):
        with connect(strict) as connection:
            connection.sendall(f"{line}\r\n{headers}\r\nConnection: close\r\n\r\n".encode())
            assert status(read_all(connection)) in (400, 421)


def test_loopback_host_headers_are_accepted_without_a_token_and_all_with_one(strict):
    for name in ("localhost", "127.0.0.1", "127.0.0.1:8700", "[::1]:8700", "LOCALHOST:1", "127.3.2.1"):
        for origin in ({}, {"Origin": f"http://{name}"}):
            assert httpx.get(f"{strict.url}/v1/info", headers={"Host": name, **origin}).status_code == 200
    with live(host(Digest()), token="t" * 20) as server:
        for headers, expected in (({}, 401), ({"Authorization": f"Bearer {'t' * 20}"}, 200)):
            assert httpx.get(f"{server.url}/v1/info", headers={"Host": "judge.example", **headers}).status_code == expected


def test_file_descriptors_are_kept_in_reserve_under_a_low_limit():
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from retouch_serve.front import _free_descriptors\n"
        "print(_free_descriptors())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert 50 < int(made.stdout) < 512 - 300


def test_a_log_is_written_at_a_bounded_rate():
    clock = [0.0]
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.addFilter(BoundedRate(burst=5, per_minute=60, clock=lambda: clock[0]))
    log = logging.Logger("stranger")
    log.addHandler(handler)
    for k in range(10_000):
        log.warning("bad request %d %s", k, "x" * 100_000)
    log.warning("something else")
    assert len(lines.getvalue().splitlines()) == 6
    assert len(lines.getvalue()) < 6 * 5000
    clock[0] = 1.0
    log.warning("bad request %d %s", 0, "y")
    assert "y (and 9995 more since the last line of this kind)" in lines.getvalue()
    for k in range(10_000):
        log.warning(f"of many kinds {k}")
    try:
        raise ValueError("x" * 100_000)
    except ValueError:
        clock[0] = 1000.0
        log.exception("with a traceback")
    assert len(lines.getvalue()) < 200_000


# Memory


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_images_of_all_requests_together_take_a_bounded_amount_of_memory(tmp_path):
    """20 requests of some kB that decode to 1.3 GB: those that exceed the budget get status 429, and memory is freed afterwards."""
    gate = tmp_path / "gate"
    flat = io.BytesIO()  # a few kB whose pixels are many MB
    Image.new("RGB", (2048, 2048)).save(flat, "WEBP", lossless=True)
    document = {
        "version": 1,
        "tasks": [{"id": "a", "instruction": "b"}],
        "items": [{"id": str(k), "task": 0, "picture": k} for k in range(4)],
        "pictures": [{"form": "encoded"}] * 4,
    }
    body, name = encode_body(json.dumps(document).encode(), [flat.getvalue()] * 4)
    kind = {"Content-Type": name}
    assert len(body) < 20_000
    limits = Limits(window=0.0, max_pixels=2**22, max_total_pixels=2**24, max_body_bytes=2**20, max_memory_bytes=200 * 2**20)
    with live(host(WaitsForFile(str(gate))), limits=limits) as server, ThreadPoolExecutor(20) as pool:

        def send():
            return httpx.post(f"{server.url}/v1/score", content=body, headers=kind, timeout=120)

        def settled():
            """Resident bytes once nothing is held."""
            end = time.monotonic() + 60
            while server.service.memory.held:
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(1.5)  # until freed memory is returned to the operating system
            return resident()

        gate.touch()
        for reply in [pool.submit(send) for _ in range(20)]:  # warm-up: memory that is allocated only once
            reply.result()
        before = settled()
        gate.unlink()
        replies, most = [pool.submit(send) for _ in range(20)], 0.0
        while sum(reply.done() for reply in replies) < 17:  # the others wait for the gate
            most = max(most, resident() - before)
            time.sleep(0.01)
        assert 0 < server.service.memory.held <= 200 * 2**20
        gate.touch()
        statuses = [reply.result().status_code for reply in replies]
        assert set(statuses) == {200, 429}
        assert most < 250e6
        assert settled() - before < 50e6
        assert send().status_code == 200


def test_memory_budget_refuses_what_exceeds_it_and_releases_memory():
    budget = MemoryBudget(100)
    budget.hold(60)
    with pytest.raises(RequestError), budget.holding(50):
        raise AssertionError
    with budget.holding(40):
        assert budget.held == 100
    image = Image.new("L", (1, 1))
    budget.release_with(image, 60)
    assert budget.held == 60
    del image
    assert budget.held == 0


def test_request_bodies_count_against_the_memory_budget():
    sizes = {"max_pixels": 2**10, "max_total_pixels": 2**10, "max_body_bytes": 2**20, "max_memory_bytes": 5 * 2**20}
    with live(host(Digest()), limits=Limits(window=0.0, body_seconds=2.0, **sizes)) as server, ExitStack() as stack:
        for _ in range(8):
            slow = stack.enter_context(connect(server))
            head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: x/y\r\nContent-Length: {2**20}\r\n\r\n"
            slow.sendall(head.encode() + bytes(2**20 - 1))
        until = time.monotonic() + 5
        while server.service.memory.held < 4 * 2**20 and time.monotonic() < until:
            time.sleep(0.01)
        held = []
        for _ in range(50):  # long enough for the bodies that are not refused
            held.append(server.service.memory.held)
            time.sleep(0.02)
        assert 4 * 2**20 <= max(held) <= 5 * 2**20
        body, kind = body_of(samples_of(1))
        while httpx.post(f"{server.url}/v1/score", content=body, headers=kind).status_code == 429:
            assert time.monotonic() < until + 30  # until the slow bodies have used up their time
            time.sleep(0.1)
    assert server.service.memory.held == 0
