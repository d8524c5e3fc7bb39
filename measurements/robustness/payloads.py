"""Sends hostile payloads to a process of `retouch serve`, and measures its memory over many requests.

    python measurements/robustness/payloads.py [--requests 50000]

Sends every payload once. Then sends ``--requests`` payloads mixed with honest requests, and checks the scores of the latter. Memory
must grow by at most 50 MB. Linux only (memory is read from /proc).
"""

import argparse
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from counting import Counts, silence

import hostile_payloads as series
from retouch_serve.wire import encode_body

# These modules are in folders that ``counting`` adds to ``sys.path``.
import test_connections as connections  # isort: skip
import test_hostile as hostile  # isort: skip
from servers import ours  # isort: skip

LIMITS = ("window=0", "max_items=64", "max_pixels=1048576", "max_total_pixels=4194304", "max_body_bytes=8388608", "body_seconds=1")
TRACES = re.compile(rb"Traceback|File \"|0x[0-9a-f]{6,}|site-packages|\.py\b")
Body = bytes | Callable[[], bytes | Iterator[bytes]]


def payloads() -> Iterator[tuple[str, Body, dict[str, str]]]:
    """The name, the body (or a function that makes it) and the headers of each request."""
    for name, image in {**hostile.PICTURES, **series.DAMAGED_IMAGES}.items():
        body, kind = encode_body(json.dumps(hostile.batch()).encode(), [image])
        yield f"image: {name}", body, {"Content-Type": kind}
    for name, document in {**hostile.DOCUMENTS, **series.WRONG_DOCUMENTS}.items():
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        body, kind = encode_body(text, [hostile.VALID_PNG])
        yield f"document: {name}", body, {"Content-Type": kind}
    for name, (make, headers) in hostile.BODIES.items():
        yield f"body: {name}", make, headers
    for name, (body, headers) in series.BROKEN_BODIES.items():
        yield f"body: {name}", body, headers


def counts(requests: int) -> Counts:
    """Send each payload once, then ``requests`` requests: payloads mixed with honest requests."""
    listed = list(payloads())
    counted = Counts(cases=len(listed) + len(connections.HEADERS))
    with ours("Digest", {}, limits=(*LIMITS, "header_seconds=2")) as server:
        (pid,), url = server.pids().values(), server.urls[0]
        good, kind = hostile.body_of(hostile.samples_of(4))
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            expected = client.post("/v1/score", content=good, headers=kind).json()

            def send(number: int) -> None:
                name, body, headers = listed[number % len(listed)]
                reply = client.post("/v1/score", content=body() if callable(body) else body, headers=headers)
                counted.wrong += _note(counted, name, 400 <= reply.status_code < 500, reply.status_code)
                counted.tracebacks += TRACES.search(reply.content) is not None

            for number in range(len(listed)):
                send(number)
            for name, parts in connections.HEADERS.items():
                reply = _exchange(url, parts)
                counted.wrong += _note(counted, name, reply.split(b" ")[1:2] in ([], [b"400"], [b"404"], [b"431"]), reply[:40])
                counted.tracebacks += TRACES.search(reply) is not None
            small = [number for number, (_, body, _) in enumerate(listed) if isinstance(body, bytes) and len(body) < 100_000]
            before = _resident(pid)
            began = time.monotonic()
            for number in range(requests):
                if number % 10:
                    send(small[number % len(small)])
                else:
                    counted.lost += client.post("/v1/score", content=good, headers=kind).json()["items"] != expected["items"]
                if number == 2000:
                    before = _resident(pid)  # from here on, memory must not grow: all code has run once
            counted.measured.append(
                f"memory after 2000 requests {before:.0f} MB, after {requests} {_resident(pid):.0f} MB "
                f"({_resident(pid) - before:+.0f}), {requests / max(time.monotonic() - began, 1e-9):.0f} requests/s"
            )
            counted.wrong += _resident(pid) - before > 50
            counted.lost += client.post("/v1/score", content=good, headers=kind).json()["items"] != expected["items"]
        log = next(server.output.parent.glob("replica-0.log")).read_bytes()
        counted.tracebacks += log.count(b"Traceback")
        counted.measured.append(f"log of the replica: {len(log) / 1e3:.0f} kB")
    return counted


def _note(counted: Counts, name: str, fine: bool, found: object) -> int:
    """Return 1 if ``fine`` is False, else 0. The first 20 such cases add a note."""
    if not fine and len(counted.notes) < 20:
        counted.notes.append(f"not refused: {name} ({found!r})")
    return int(not fine)


def _exchange(url: str, parts: Sequence[bytes]) -> bytes:
    """Send the parts on a new connection, and return the bytes that come back until it is closed or reset."""
    address = urlsplit(url)
    came = b""
    try:
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(65536):
                came += part
    except OSError:
        pass
    return came


def _resident(pid: int) -> float:
    """The resident memory of a process, in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1e3  # type: ignore[index]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000, metavar="N")
    silence()
    sys.exit(counts(parser.parse_args().requests).finish("payloads to a reward server"))
