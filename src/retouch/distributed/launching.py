"""Several ranks on this machine: one process each, under torchrun's environment variables; all end if one dies.

The ranks stand in process groups of their own, so Ctrl-C in the terminal reaches only the launcher, which passes it on once.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

GRACE_SECONDS = 30.0
_POLL_SECONDS = 0.05
_STDOUT = 1


def launch(nproc: int, gpus: Sequence[int] | None, argv: Sequence[str], *, logs: Path) -> int:
    """Run ``retouch <argv>`` as ``nproc`` ranks and return the exit code of the first that failed, or 0.

    ``gpus``: the CUDA devices to use, equally many a rank; None leaves the choice to each rank. ``logs``: folder of ``rank-N.log``;
    what rank 0 says also goes to the terminal. ValueError: an impossible number of ranks or devices, or ranks already under a
    launcher.
    """
    if nproc < 1:
        raise ValueError(f"--nproc {nproc}: take 1 or more")
    if gpus is not None and (not gpus or len(gpus) % nproc or len(set(gpus)) != len(gpus)):
        named = ",".join(map(str, gpus))
        raise ValueError(f"--gpus {named}: name one device for each of the {nproc} ranks, or equally many, and each once")
    if "RANK" in os.environ:
        raise ValueError(f"this is rank {os.environ['RANK']} of a launcher already; start the command itself, without launch")
    command = [sys.executable, "-m", "retouch.cli", *argv]
    return run_ranks(command, environments(nproc, gpus), logs=logs, grace=GRACE_SECONDS)


def environments(nproc: int, gpus: Sequence[int] | None = None) -> list[dict[str, str]]:
    """The environment of each rank: this process's own, torchrun's variables, and a fair share of the CPU's threads unless set."""
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONUNBUFFERED": "1",
    }
    if gpus is not None:
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    threads = {"OMP_NUM_THREADS": str(max(1, _cores() // nproc))}
    return [{**threads, **os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], *, logs: Path, grace: float) -> int:
    """Run the command once under each environment, until all have ended; the exit code of the first that failed, or 0.

    When one fails, the others get SIGTERM, and ``grace`` seconds later SIGKILL with all that they started. The first SIGINT or
    SIGTERM that comes here is passed on, and ranks may end in their own time (``grace`` from the first that fails); a second kills.
    A rank that dies of signal n counts as 128 + n.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals() as stop:
        try:
            ranks.append(_start(command, environments[0], subprocess.PIPE))
            copier = threading.Thread(target=_copy, args=(ranks[0].stdout, logs / "rank-0.log"), daemon=True)
            copier.start()
            for number, environment in enumerate(environments[1:], start=1):
                with open(logs / f"rank-{number}.log", "wb") as log:
                    ranks.append(_start(command, environment, log))
            code = _wait(ranks, stop, grace)
        finally:
            _kill(ranks)
    # Something that rank 0 left behind may hold its output open for ever.
    copier.join(timeout=5.0)
    return code


def _start(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
    )


def _copy(source: IO[bytes], log: Path) -> None:
    """To the log and to the terminal, as it comes; to the log alone once the terminal is gone."""
    with source, open(log, "wb", buffering=0) as kept:
        while block := os.read(source.fileno(), 65536):
            kept.write(block)
            with suppress(OSError):
                os.write(_STDOUT, block)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], stop: list[int], grace: float) -> int:
    """Watch the ranks until all have ended, passing signals on and ending the rest after a failure."""
    first_failure, deadline, passed_on = 0, float("inf"), 0
    while running := [rank for rank in ranks if rank.poll() is None]:
        if not first_failure:
            first_failure = next((_exit_code(rank) for rank in ranks if rank.returncode), 0)
            if first_failure:
                deadline = time.monotonic() + grace
                # Ranks that were told to stop are saving; a second signal would disturb them.
                if not passed_on:
                    _send(running, signal.SIGTERM)
        if len(stop) > passed_on:
            if passed_on or first_failure:
                deadline = 0.0
            else:
                _send(running, stop[0])
            passed_on = len(stop)
        if time.monotonic() > deadline:
            _kill(running)
        time.sleep(_POLL_SECONDS)
    return first_failure or next((_exit_code(rank) for rank in ranks if rank.returncode), 0)


def _exit_code(rank: subprocess.Popen[bytes]) -> int:
    return rank.returncode if rank.returncode >= 0 else 128 - rank.returncode


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """To the ranks alone: what they started (workers that load data, say) is theirs to end."""
    for rank in ranks:
        rank.send_signal(number)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with all that it started."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The SIGINTs and SIGTERMs that came while the block ran, in order. A closed terminal counts as SIGTERM, save under nohup."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(signal.SIGTERM if number == signal.SIGHUP else number)

    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
