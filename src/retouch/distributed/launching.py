"""Starts the ranks of a run on this machine, one process each with torchrun's environment variables, and ends them together.

If one rank fails, all ranks are terminated. If the launcher, or torchrun's agent, dies, even by SIGKILL, so do its ranks: a small
guardian process reads a pipe from the launcher, and if the pipe closes before the launcher wrote "done", it kills every rank
together with the rank's child processes. On Linux each rank also asks the kernel to kill it when its parent dies, in case the
guardian was killed too.

Each rank has its own process group, so Ctrl-C in the terminal reaches only the launcher, which forwards it once. torchrun's agent
is not used, because after the first signal it kills ranks that need more than 30 s to save a checkpoint, also signals the worker
processes of the ranks, and always exits with 1.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from retouch.config import imports
from retouch.records import files
from retouch.records.ownership import Owner

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


GRACE_SECONDS = 30.0
_POLL_SECONDS = 0.05
_STDOUT = 1
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def launch(nproc: int, gpus: Sequence[int] | None, argv: Sequence[str], *, logs: Path, owner: Owner | None = None) -> int:
    """Run ``retouch <argv>`` on ``nproc`` ranks and return the exit code of the first rank that failed, or 0.

    ``gpus``: the CUDA devices to use, the same number for each rank; None lets each rank choose. ``logs``: the folder of
    ``rank-N.log``; the output of rank 0 also goes to the terminal. ``owner``: the ownership of the run's folder, which the ranks
    share. Raises ValueError if the number of ranks or devices is impossible, or if this process is already a rank of a launcher.
    """
    if nproc < 1:
        raise ValueError(f"--nproc {nproc}: give 1 or more")
    if gpus is not None and (not gpus or len(gpus) % nproc or len(set(gpus)) != len(gpus)):
        named = ",".join(map(str, gpus))
        raise ValueError(f"--gpus {named}: give the same number of devices for each of the {nproc} ranks, and each device once")
    if gpus is not None:
        require_gpus(gpus)
    if "RANK" in os.environ:
        raise ValueError(f"this process is already rank {os.environ['RANK']} of a launcher; run the command without `launch`")
    command = imports.python("-m", "retouch.cli", *argv)
    return run_ranks(command, rank_environments(nproc, gpus), logs=logs, grace=GRACE_SECONDS, owner=owner)


def require_gpus(gpus: Sequence[int]) -> None:
    """Raise ValueError if this machine lacks one of the CUDA devices of ``--gpus``; otherwise the CPU would be used silently."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [number for number in gpus if number >= there]
    if not missing:
        return
    named = ",".join(map(str, gpus))
    if there:
        raise ValueError(f"--gpus {named}: there is no CUDA device {missing[0]}; this machine has {there}, from 0 to {there - 1}")
    build = "" if torch.version.cuda else f", and torch {torch.__version__} is a build without CUDA"
    raise ValueError(f"--gpus {named}: no CUDA device was found{build}; leave --gpus away to use the CPU")


def rank_environments(nproc: int, gpus: Sequence[int] | None = None) -> list[dict[str, str]]:
    """Return each rank's environment: this process's variables, torchrun's, and unless they are set OMP_NUM_THREADS = cores / ranks
    and the loopback interface for gloo and NCCL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "PYTHONUNBUFFERED": "1",
    }
    if gpus is not None:
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback[0])
    return [{**defaults, **imports.environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]


def run_ranks(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], *, logs: Path, grace: float, owner: Owner | None = None
) -> int:
    """Run the command in one process per environment until all have ended. Returns the exit code of the first failure, or 0.

    If a rank fails, the others receive SIGTERM, and after ``grace`` seconds SIGKILL, together with their child processes. The first
    SIGINT or SIGTERM sent to this process is forwarded to the ranks, which may take as long as they need to stop (``grace`` seconds
    after one has failed); a second signal kills them. A rank that dies of signal n has the exit code 128 + n. If this process is
    killed, the ranks and their child processes are killed too. ``owner``: the ownership of a run's folder, which the ranks share.
    The ranks find each other through a file in a private folder: torch's own store would listen on all interfaces.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals() as stop, guardian() as guard, tempfile.TemporaryDirectory(prefix="retouch-ranks-") as private:
        shared = {LAUNCHER: str(os.getpid()), STORE: f"{private}/store"} | ({} if owner is None else owner.environment())

        def start(environment: Mapping[str, str], output: IO[bytes] | int) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env={**environment, **shared},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=() if owner is None else (owner.fileno(),),
            )

        try:
            ranks.append(guard(start(environments[0], subprocess.PIPE)))
            copier = threading.Thread(target=_tee, args=(ranks[0].stdout, logs / "rank-0.log"), daemon=True)
            copier.start()
            for number, environment in enumerate(environments[1:], start=1):
                with files.open_file(logs / f"rank-{number}.log", _NEW) as log:
                    ranks.append(guard(start(environment, log)))
            first_failure, deadline, forwarded = 0, float("inf"), 0
            while running := [rank for rank in ranks if rank.poll() is None]:
                if not first_failure:
                    first_failure = next((_exit_code(rank) for rank in ranks if rank.returncode), 0)
                    if first_failure:
                        deadline = time.monotonic() + grace
                        # Ranks that were already asked to stop are saving a checkpoint, which a second signal would interrupt.
                        if not forwarded:
                            _send(running, signal.SIGTERM)
                if len(stop) > forwarded:
                    if forwarded or first_failure:
                        deadline = 0.0
                    else:
                        _send(running, stop[0])
                    forwarded = len(stop)
                if time.monotonic() > deadline:
                    _kill(running)
                time.sleep(_POLL_SECONDS)
            code = first_failure or next((_exit_code(rank) for rank in ranks if rank.returncode), 0)
        finally:
            _kill(ranks)
    # A child process of rank 0 that is still running may keep rank 0's output open forever.
    copier.join(timeout=5.0)
    return code


def _tee(source: IO[bytes], log: Path) -> None:
    """Copy rank 0's output to its log and to the terminal as it arrives; after the terminal is closed, only to the log."""
    with source, files.open_file(log, _NEW) as file:
        while block := os.read(source.fileno(), 65536):
            file.write(block)
            file.flush()
            with suppress(OSError):
                os.write(_STDOUT, block)


def _exit_code(rank: subprocess.Popen[bytes]) -> int:
    return rank.returncode if rank.returncode >= 0 else 128 - rank.returncode


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Signal only the ranks; each rank stops its own child processes (for example, data loading workers)."""
    for rank in ranks:
        rank.send_signal(number)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the ranks that are still running, with all their child processes."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the list of signals received inside the block, in order. SIGHUP counts as SIGTERM, unless it is ignored (nohup)."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.SIGTERM if number == signal.SIGHUP else number)

    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
