"""Tries to exhaust a reward server and `retouch view`, and measures how they serve honest callers at the same time.

    python measurements/robustness/exhaustion.py [--source OTHER_CHECKOUT/src]

The attacks: slow, silent and endless requests of 1100 clients on both servers; and on the reward server, images that are large only
when decoded, a foreign ``Host`` header, and a sample on which the reward hangs. `--source` runs the servers of another version of
the source tree, to compare two versions. Linux only.
"""

import argparse
import functools
import io
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from counting import Counts, silence
from PIL import Image

from retouch_serve.wire import encode_body

# These modules are in folders that ``counting`` adds to ``sys.path``.
import test_hostile as hostile  # isort: skip
from servers import serving  # isort: skip
from slow_clients import ATTACKS, attacking, honest  # isort: skip

CONNECTIONS = 1100
HONEST = 50
FILES = 1024  # file descriptors of the server: the default of most systems
LARGE_REQUESTS = 20
SIDE = 4096  # pixels; one image is within the limits of a request
REWARDS = {kind: json.dumps({"kind": "import", "class": f"scorers:{kind}"}) for kind in ("Digest", "Sleeps")}


def slow_clients(counted: Counts, name: str, url: str, pid: int, log: Path, ask: Callable[[], bool], attacks: list[str]) -> None:
    """Attack the server with ``CONNECTIONS`` clients in each way. Honest requests must be answered, with a median below 0.5 s."""
    honest(ask, 5)  # memory that is allocated only once
    before, most, slowest, fewest = _resident(pid), 0.0, 0.0, HONEST
    for attack in attacks:
        with attacking(url, ATTACKS[attack], CONNECTIONS):
            answered, seconds = honest(ask, HONEST)
            most = max(most, _resident(pid) - before)
        counted.cases += 1
        counted.lost += HONEST - answered
        counted.wrong += seconds >= 0.5
        print(f"{name}, {attack}: {answered} of {HONEST} answered, median {seconds:.3f} s", flush=True)
        slowest, fewest = max(slowest, seconds), min(fewest, answered)
    counted.tracebacks += log.read_bytes().count(b"Traceback")
    written = log.stat().st_size / 1e3
    counted.wrong += (most > 200) + (written > 100)
    counted.measured.append(
        f"{name}: at least {fewest} of {HONEST} answered, slowest median {slowest:.2f} s, "
        f"memory +{most:.0f} MB, log {written:.0f} kB"
    )


@contextmanager
def viewing(folder: Path) -> Iterator[tuple[str, int, Path, Callable[[], bool]]]:
    """Start `retouch view`. Gives its address, its process id, its log, and a request of a browser that has the token."""
    log = folder / "view.log"
    command = [sys.executable, "-m", "retouch.cli", "view", str(folder), "--port", "0"]
    with log.open("wb") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        try:
            assert process.stdout is not None
            url, _, token = process.stdout.readline().split("open ")[1].strip().partition("/?token=")
            with httpx.Client(base_url=url, trust_env=False, follow_redirects=True, timeout=30) as client:
                client.get(f"/?token={token}").raise_for_status()
                cookies = dict(client.cookies)
            yield url, process.pid, log, lambda: _answered("GET", f"{url}/api/runs", cookies=cookies)
        finally:
            process.kill()


def _answered(method: str, url: str, **options: Any) -> bool:
    try:
        return httpx.request(method, url, timeout=5, trust_env=False, **options).status_code == 200
    except httpx.HTTPError:
        return False


def large_images(url: str, pid: int) -> str:
    """Send ``LARGE_REQUESTS`` requests at once, each with one image of ``SIDE`` x ``SIDE`` pixels in a few bytes."""
    body, kind = encode_body(json.dumps(hostile.batch()).encode(), [_black(SIDE)])
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
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every N-th attack of slow clients")
    arguments = parser.parse_args()
    silence()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if arguments.source is not None:
        os.environ["PYTHONPATH"] = str(arguments.source.resolve())
    counted = Counts()
    attacks = list(ATTACKS)[:: arguments.every]
    body, kind = hostile.body_of(hostile.samples_of(1))
    for name, reward, measure in (
        (f"{LARGE_REQUESTS} large images at once", "Digest", large_images),
        ("a foreign Host header", "Digest", lambda url, pid: foreign_host(url)),
        ("a reward that hangs", "Sleeps", lambda url, pid: hung_reward(url)),
        ("slow clients", "Digest", None),
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))  # the server inherits this limit
        try:
            with serving(REWARDS[reward], replicas=1) as server:
                resource.setrlimit(resource.RLIMIT_NOFILE, (4 * FILES, hard))  # the limit of this process
                url, pid = server.urls[0], server.pids()[0]
                if measure is not None:
                    print(f"{name}: {measure(url, pid)}", flush=True)
                    continue
                ask = functools.partial(_answered, "POST", f"{url}/v1/score", content=body, headers=kind)
                slow_clients(counted, "reward server", url, pid, server.output.parent / "replica-0.log", ask, attacks)
        except subprocess.TimeoutExpired:
            counted.wrong += 1
            print("... and the server did not stop within 60 s of SIGTERM", flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    with TemporaryDirectory() as folder, viewing(Path(folder)) as (url, pid, log, browse):
        resource.setrlimit(resource.RLIMIT_NOFILE, (4 * FILES, hard))
        slow_clients(counted, "page of runs", url, pid, log, browse, attacks)
    return counted.finish(f"attacks of {CONNECTIONS} slow clients")


if __name__ == "__main__":
    sys.exit(main())
