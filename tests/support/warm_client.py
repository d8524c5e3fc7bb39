"""Runs a Python command line in a fork of the process of ``warm_server``: the same output, signals and exit status.

``warm_python`` writes an executable file that calls ``main``. It understands the options -P, -u, -W ACTION, -m and -c.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn


def main(server: str, words: list[str]) -> NoReturn:
    """Run the command line ``words`` on this server; end with its status or signal. SystemExit for an unknown option."""
    status = run(server, words)
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def run(server: str, words: list[str]) -> int:
    """Run the command line and return its exit status as ``os.waitpid`` gives it; forward the signals of this process."""
    # The program's parent is a fork of the server, so it cannot check that its parent is the launcher.
    environment = {name: value for name, value in os.environ.items() if name != "RETOUCH_LAUNCHER"}
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN]
    files = open_files()
    request = parse_command_line(words) | {
        "executable": sys.argv[0],
        "environment": environment,
        "folder": os.getcwd(),
        "group": os.getpgrp(),
        "ignored_signals": ignored,
        "files": files,
    }
    text = json.dumps(request).encode()
    forwarded = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1} - set(ignored)
    # The program may print before this process knows its ID, and who reads that may send a signal at once.
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        socket.send_fds(connection, [struct.pack("i", len(text))], files)
        connection.sendall(text)
        (process,) = struct.unpack("i", connection.recv(4))

        def forward(number: int, frame: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                os.kill(process, number)

        for number in forwarded:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        (status,) = struct.unpack("i", connection.recv(4))
    return int(status)


def parse_command_line(words: list[str]) -> dict[str, Any]:
    """Parse a command line of Python."""
    words = list(words)
    made: dict[str, Any] = {"safe_path": False, "unbuffered": bool(os.environ.get("PYTHONUNBUFFERED")), "warnings": []}
    while words:
        word = words.pop(0)
        if word == "-P":
            made["safe_path"] = True
        elif word == "-u":
            made["unbuffered"] = True
        elif word == "-W":
            made["warnings"].append(words.pop(0))
        elif word in ("-m", "-c"):
            return {**made, "kind": "module" if word == "-m" else "code", "program": words.pop(0), "arguments": words}
        elif word == "-B":
            pass  # the server decides whether byte code is written
        elif word.startswith("-"):
            sys.exit(f"{__file__} does not know the option {word}: use sys.executable in this test")
        else:
            return {**made, "kind": "file", "program": word, "arguments": words}
    sys.exit(f"{__file__}: give a program")


def open_files() -> list[int]:
    """Return the numbers of the open files that this process inherited."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)
