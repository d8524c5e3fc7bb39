"""Kills the ranks of a run when their launcher, or torchrun's agent, dies, even by SIGKILL.

A small guardian process reads a pipe from the launcher. If the pipe closes before the launcher wrote "done", the guardian kills
every rank together with the rank's child processes. On Linux each rank also asks the kernel to kill it when its parent dies, in
case the guardian was killed too.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from retouch.config import imports

LAUNCHER = "RETOUCH_LAUNCHER"
STORE = "RETOUCH_RANK_STORE"
"""The variable with the path of the file through which the ranks of ``retouch launch`` find each other."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The variable that torchrun's agent sets in the ranks that it starts."""
_PR_SET_PDEATHSIG = 1
_DONE = b"done\n"
_PROGRAM = """
import os, signal, sys
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
lines = sys.stdin.read().split()
if "done" not in lines:
    for group in lines:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


@contextmanager
def guardian() -> Iterator[Callable[["subprocess.Popen[bytes]"], "subprocess.Popen[bytes]"]]:
    """Start the guardian. Yields a function that registers a process, which leads its own process group, and returns the process.

    If this process dies inside the block, the guardian kills the registered process groups. Leaving the block, also by an
    exception, ends the guardian.
    """
    reader = subprocess.Popen(
        imports.python("-I", "-S", "-c", _PROGRAM),
        env=imports.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert reader.stdin is not None
    pipe = reader.stdin

    def guard(process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
        with suppress(BrokenPipeError):
            pipe.write(f"{process.pid}\n".encode())
            pipe.flush()
        return process

    try:
        yield guard
    finally:
        with suppress(BrokenPipeError):
            pipe.write(_DONE)
            pipe.flush()
        with suppress(BrokenPipeError):
            pipe.close()
        reader.wait()


def die_with_launcher() -> None:
    """In a rank: ask the kernel to send SIGKILL when the launcher or torchrun's agent dies (only on Linux).

    Otherwise the ranks of torchrun would continue to train after their agent was killed, and so would those on other machines.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # otherwise the rank's children would expect the launcher to be their parent
    if (launcher is None and _TORCHRUN not in os.environ) or sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (parent if launcher is None else int(launcher)):
        sys.exit("the launcher of this rank has ended")
