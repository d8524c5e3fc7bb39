"""Tries to exhaust a reward server, and measures how it serves honest callers at the same time.

    python benchmarks/robustness/exhaustion.py [--source OTHER_CHECKOUT/src]

The attacks: slow connections that never send a whole header, images that are large only when decoded, a foreign ``Host`` header,
and a sample on which the reward hangs. `--source` runs the server of another version of the source tree, to compare two versions.
Linux only.
"""

import argparse
import io
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from counting import silence
from PIL import Image

from retouch.rewards.wire.bodies import encode_body

# These modules are in folders that ``counting`` adds to ``sys.path``.
import test_hostile as hostile  # isort: skip
from servers import serving  # isort: skip

CONNECTIONS = 1100
FILES = 1024  # file descriptors of the server: the default of most systems
LARGE_REQUESTS = 20
SIDE = 4096  # pixels; one image is within the limits of a request
REWARDS = {kind: json.dumps({"kind": "import", "class": f"scorers:{kind}"}) for kind in ("Digest", "Sleeps")}


def slow_connections(url: str) -> str:
    """Open `CONNECTIONS` connections that never send a whole header. Reports how fast honest requests are answered."""
    address = urlsplit(url)
    body, kind = hostile.body_of(hostile.samples_of(1))
    seconds, failures = [], 0
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            try:
                connection = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=5))
                connection.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
            except OSError:  # the server accepts no more
                break
        for _ in range(10):
            began = time.monotonic()
            try:
                httpx.post(f"{url}/v1/score", content=body, headers=kind, timeout=5, trust_env=False).raise_for_status()
            except httpx.HTTPError:
                failures += 1
            seconds.append(time.monotonic() - began)
    return f"{10 - failures} of 10 honest requests answered, median {statistics.median(seconds):.2f} s"


def large_images(url: str, pid: int) -> str:
    """Send ``LARGE_REQUESTS`` requests at once, each with one image of ``SIDE`` x ``SIDE`` pixels in a few bytes."""
    body, kind = encode_body(json.dumps(hostile.batch()).encode(), [_black(SIDE)], "multipart")
    largest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.02):
            largest = max(largest, _resident(pid))

    before = _resident(pid)
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(LARGE_REQUESTS) as pool:
        codes = list(pool.map(lambda _: _status(url, body, {"Content-Type": kind}), range(LARGE_REQUESTS)))
    done.set()
    watcher.join()
    found = ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes)))
    return f"{len(body)} bytes each: memory {before:.0f} -> {largest:.0f} MB ({found})"


def foreign_host(url: str) -> str:
    """Send a request with a foreign ``Host`` header. Reports the status code."""
    return str(httpx.get(f"{url}/v1/info", headers={"Host": "attacker.example"}, timeout=10, trust_env=False).status_code)


def hung_reward(url: str) -> str:
    """Send a sample on which the reward sleeps. Reports how long six honest requests wait, and the status of ``/readyz`` then."""
    body, kind = hostile.body_of(hostile.samples_of(1, text="sleep"))
    _status(url, body, {**kind, "X-Deadline-Seconds": "2"})
    honest, kind = hostile.body_of(hostile.samples_of(1))
    found = []
    for _ in range(6):
        began = time.monotonic()
        code = _status(url, honest, {**kind, "X-Deadline-Seconds": "5"})
        found.append(f"{code} after {time.monotonic() - began:.1f} s")
    ready = httpx.get(f"{url}/readyz", timeout=10, trust_env=False).status_code
    return f"honest requests: {', '.join(found)}; then /readyz {ready}"


def _black(side: int) -> bytes:
    """A valid PNG of ``side`` x ``side`` black pixels, 1 bit each."""
    data = io.BytesIO()
    Image.new("1", (side, side)).save(data, "PNG", optimize=True)
    return data.getvalue()


def _status(url: str, body: bytes, headers: dict[str, str]) -> int:
    try:
        return httpx.post(f"{url}/v1/score", content=body, headers=headers, timeout=120, trust_env=False).status_code
    except httpx.HTTPError:
        return 0


def _resident(pid: int) -> float:
    """The resident memory of a process, in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1e3  # type: ignore[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, metavar="DIR", help="the `src` folder of another version")
    source = parser.parse_args().source
    silence()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if source is not None:
        os.environ["PYTHONPATH"] = str(source.resolve())
    for name, reward, measure in (
        (f"{CONNECTIONS} slow connections", "Digest", lambda url, pid: slow_connections(url)),
        (f"{LARGE_REQUESTS} large images at once", "Digest", large_images),
        ("a foreign Host header", "Digest", lambda url, pid: foreign_host(url)),
        ("a reward that hangs", "Sleeps", lambda url, pid: hung_reward(url)),
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))  # the server inherits this limit
        try:
            with serving(REWARDS[reward], replicas=1) as server:
                resource.setrlimit(resource.RLIMIT_NOFILE, (4 * FILES, hard))  # the limit of this process
                print(f"{name}: {measure(server.urls[0], server.pids()[0])}", flush=True)
        except subprocess.TimeoutExpired:
            print("... and the server did not stop within 60 s of SIGTERM", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
