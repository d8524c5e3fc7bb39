"""Ranks do not outlive their launcher, even if it is killed with SIGKILL; nor the agent of torchrun.

A small guardian process reads a pipe from the launcher. When the pipe closes without the launcher's last word, it kills every
rank together with the rank's own child processes. On Linux each rank also asks the kernel to be killed when its parent dies, in
case the guardian was killed too.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LAUNCHER = "RETOUCH_LAUNCHER"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun's agent, which starts its ranks itself."""
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
    """A function that puts a process with its own process group under guard, and returns it.

    If this process dies inside the block, the groups are killed. Leaving the block, also by an exception, ends the guard.
    """
    reader = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM],
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
    """In a rank: ask the kernel for SIGKILL when the launcher or torchrun's agent dies (Linux); otherwise nothing.

    torchrun's own ranks would train on after their agent was killed, and the other machines with them.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # so that the rank's own children do not take the launcher for their parent
    if (launcher is None and _TORCHRUN not in os.environ) or sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (parent if launcher is None else int(launcher)):
        sys.exit("the launcher of this rank has ended")
