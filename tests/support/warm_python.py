"""Starts Python programs from tests without waiting for the imports of torch, diffusers and transformers.

``python()`` returns an executable file that is used like ``sys.executable``; the program runs in a fork of a server that has
imported these libraries. Four things differ: the program's parent is a fork of the server, so ``Popen.pid`` is the process ID of a
client that forwards signals; the libraries have read their environment variables already; the memory of the server counts for the
program; and the hash seed is the server's. Tests of any of these, and tests of the imports themselves, use ``sys.executable``.

``RETOUCH_COLD_TESTS=1`` starts every program with a new interpreter instead, and so do systems other than Linux.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SUPPORT = Path(__file__).parent
CLIENT = """#!{python} -IS
import sys
sys.path.append({support!r})
import warm_client
warm_client.main({server!r}, sys.argv[1:])
"""


def is_warm() -> bool:
    """Return whether programs start in forks."""
    return sys.platform == "linux" and not os.environ.get("RETOUCH_COLD_TESTS")


def python() -> str:
    """Return the path of the executable; the server starts at the first call and ends with this process."""
    return start_server() if is_warm() else sys.executable


@functools.cache
def start_server() -> str:
    """Start the server of this process and return the path of its client. RuntimeError if it does not start."""
    folder = tempfile.TemporaryDirectory(prefix="retouch-warm-")
    server, client = f"{folder.name}/socket", Path(folder.name, "python")
    client.write_text(CLIENT.format(python=sys.executable, support=str(SUPPORT), server=server))
    client.chmod(0o755)
    # One thread, because threads do not survive a fork; and none of the modules that a test put on the path.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, str(SUPPORT / "warm_server.py"), server]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def end() -> None:
        process.communicate()  # closes the standard input, and waits
        folder.cleanup()

    atexit.register(end)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"{command} did not start")
    return str(client)


def run_python(*words: object, search: Sequence[object] = (), timeout: float = 900, **variables: str) -> str:
    """Run a program with ``python()`` and return its output; the assertion shows the output of a program that fails. ``search``:
    folders that its imports search before those of this process. ``variables``: added to the environment."""
    path = {"PYTHONPATH": os.pathsep.join([*map(str, search), *sys.path])} if search else {}
    command, environment = [python(), "-W", "ignore", *map(str, words)], {**os.environ, **path, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    return done.stdout
