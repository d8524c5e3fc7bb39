"""``retouch serve --engine ray`` in a process, for tests that are also run on the server without Ray."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import loopback

HERE = Path(__file__).parent
ON_RAY = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray Serve: pip install 'retouch[ray]'"),
]


@dataclass(frozen=True)
class RayServer:
    """``lines``: the lines that the command has printed so far."""

    url: str
    client: httpx.Client
    process: "subprocess.Popen[str]"
    lines: list[str]

    def wait_for(self, word: str, *, times: int = 1) -> None:
        while sum(word in line for line in self.lines) < times:
            assert self.process.poll() is None, self.lines
            time.sleep(0.05)


@contextmanager
def ray_server(*words: str, ready: str = "is ready") -> Iterator[RayServer]:
    """Serve on a Ray cluster of its own, which stops at the end of the block."""
    port = loopback.free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", "retouch.cli", "serve", "--engine", "ray", "--port", str(port), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE, env=environment)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
    reader.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
            server = RayServer(url, client, process, lines)
            server.wait_for(ready)
            yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=300)
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()
