"""Starts reward servers as separate processes for the serving measurements: `retouch serve`, or the plain server."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

HERE = Path(__file__).parent
_STARTED = re.compile(r"^replica (\d+): (http://\S+), pid (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Ours:
    """A running `retouch serve`.

    ``output``: the file with the lines of the supervisor, which name the latest process of each replica. ``supervisor``: the
    process id of the supervisor.
    """

    urls: tuple[str, ...]
    output: Path
    supervisor: int

    def pids(self) -> dict[int, int]:
        """The process id of each replica's latest process, by number of the replica."""
        return {int(number): int(pid) for number, _, pid in _STARTED.findall(self.output.read_text())}


def ours(
    scorer: str, arguments: dict[str, float], *, replicas: int = 1, limits: Sequence[str] = ()
) -> AbstractContextManager[Ours]:
    """Start `retouch serve` with a class of scorers.py. ``arguments``: the arguments of the class."""
    section = {"kind": "import", "class": f"scorers:{scorer}", "args": arguments}
    return serving(json.dumps(section), replicas=replicas, limits=limits)


@contextmanager
def serving(reward: str, *, replicas: int, limits: Sequence[str] = ()) -> Iterator[Ours]:
    """Start `retouch serve` with any reward, and wait until all replicas are ready."""
    with TemporaryDirectory() as folder, open(Path(folder) / "output", "w") as output:
        words = ["serve", reward, "--port", "0", "--replicas", str(replicas), "--logs", folder]
        words += [word for limit in limits for word in ("--limit", limit)]
        with _process([sys.executable, "-m", "retouch.cli", *words], output) as pid:
            path = Path(folder) / "output"
            _wait(lambda: path.read_text().count("is ready") == replicas)
            yield Ours(tuple(url for _, url, _ in _STARTED.findall(path.read_text())), path, pid)


@contextmanager
def plain(base: float, each: float) -> Iterator[tuple[str, int]]:
    """Start the plain server. Gives its address and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _process([sys.executable, str(HERE / "plain_server.py"), str(port), str(base), str(each)], subprocess.DEVNULL) as pid:
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: _healthy(url))
        yield url, pid


@contextmanager
def _process(command: list[str], output: object) -> Iterator[int]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=HERE)  # type: ignore[call-overload]
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def _wait(true: object) -> None:
    end = time.monotonic() + 600
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            raise SystemExit("the server did not start")
        time.sleep(0.05)
