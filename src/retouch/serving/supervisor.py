"""``retouch serve``: several replicas of one server, each with a port, a log and a device, and a new one for each that dies.

The supervisor has imported all that a replica needs, and forks, so a replica is back as soon as its weights are. It never imports
a user's own code itself. SIGTERM drains all replicas; SIGHUP is passed on, and each builds its rewards anew.
"""

import errno
import http.client
import ipaddress
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from retouch.serving.hosted import read_orders
from retouch.serving.replica import USER_ERROR, Settings, bound, run

_POLL = 0.05
_HEALTH_SECONDS = 2.0
_STUCK_SECONDS = 60.0
_SHORT_LIFE = 5.0
_LONGEST_PAUSE = 30.0
_FORK = multiprocessing.get_context("fork")


@dataclass(slots=True)
class _Replica:
    number: int
    settings: Settings
    log: Path
    gpu: int | None
    process: ForkProcess | None = None
    started: float = 0.0
    start_at: float = 0.0
    short_lives: int = 0
    ready: bool = False
    heard: float = 0.0
    listened: float = field(default=0.0)


def serve(
    settings: Settings,
    *,
    replicas: int,
    gpus: Sequence[int] | None,
    logs: Path,
    token: str | None,
    say: Callable[[str], None],
) -> int:
    """Run the replicas until SIGTERM or SIGINT, telling through ``say`` where each one is; the exit code.

    ``settings.port`` is the first port, or 0 for any that are free. ValueError: unknown rewards, or ports in use.
    """
    read_orders(settings.rewards)
    if replicas < 1:
        raise ValueError(f"--replicas {replicas}: at least one")
    logs.mkdir(parents=True, exist_ok=True)
    with _kept_ports(settings.host, settings.port, replicas) as ports:
        family = [
            _Replica(
                number, replace(settings, port=port), logs / f"replica-{number}.log", gpus[number % len(gpus)] if gpus else None
            )
            for number, port in enumerate(ports)
        ]
        return _Supervisor(family, token=token, say=say).run()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Supervisor:
    def __init__(self, family: Sequence[_Replica], *, token: str | None, say: Callable[[str], None]) -> None:
        self._family, self._token, self._say = family, token, say
        self._stop = 0
        self._reload = False
        self._code = 0

    def run(self) -> int:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            while not self._stop:
                for member in self._family:
                    self._look_after(member)
                if self._reload:
                    self._reload = False
                    self._send(signal.SIGHUP)
                time.sleep(_POLL)
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._code

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload = True
        else:
            self._stop += 1

    def _look_after(self, member: _Replica) -> None:
        now = time.monotonic()
        if member.process is None:
            if now >= member.start_at:
                self._start(member)
        elif member.process.exitcode is not None:
            self._bury(member, member.process.exitcode)
        elif now > member.listened + (_POLL if not member.ready else _HEALTH_SECONDS):
            member.listened = now
            self._listen(member)

    def _start(self, member: _Replica) -> None:
        environment = {} if member.gpu is None else {"CUDA_VISIBLE_DEVICES": str(member.gpu)}
        arguments = {"log": member.log, "environment": environment, "token": self._token, "parent": os.getpid()}
        member.process = _FORK.Process(target=run, args=(member.settings,), kwargs=arguments, name=f"replica-{member.number}")
        member.process.start()
        member.started = member.heard = time.monotonic()
        member.ready = False
        gpu = "" if member.gpu is None else f", GPU {member.gpu}"
        self._say(f"replica {member.number}: {url_of(member.settings)}, pid {member.process.pid}{gpu}, log {member.log}")

    def _bury(self, member: _Replica, code: int) -> None:
        if code == USER_ERROR:
            self._say(f"replica {member.number} cannot start: {_last_line(member.log)}")
            self._stop, self._code = 1, USER_ERROR
            return
        lived = time.monotonic() - member.started
        member.short_lives = member.short_lives + 1 if lived < _SHORT_LIFE else 0
        pause = min(_LONGEST_PAUSE, 0.1 * 2**member.short_lives) if member.short_lives > 1 else 0.0
        member.process, member.start_at = None, time.monotonic() + pause
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._say(f"replica {member.number} died ({how}); starting it again{f' in {pause:.1f} s' if pause else ''}")

    def _listen(self, member: _Replica) -> None:
        """Say when it is ready; end one that was and has not answered for long."""
        answered = answers(member.settings, "/livez" if member.ready else "/readyz")
        if answered and not member.ready:
            member.ready = True
            self._say(f"replica {member.number} is ready")
        if answered:
            member.heard = time.monotonic()
        elif member.ready and time.monotonic() > member.heard + _STUCK_SECONDS:
            assert member.process is not None
            self._say(f"replica {member.number} has not answered for {_STUCK_SECONDS:.0f} s; killing it")
            member.process.kill()
            member.heard = time.monotonic()

    def _send(self, number: signal.Signals) -> None:
        for member in self._family:
            if member.process is not None and member.process.pid is not None and member.process.exitcode is None:
                os.kill(member.process.pid, number)

    def _end(self) -> None:
        """Drain them all; a second signal, or the drain time gone twice, kills."""
        self._send(signal.SIGTERM)
        told = self._stop
        deadline = time.monotonic() + 2 * max(member.settings.limits.drain_seconds for member in self._family)
        while any(member.process is not None and member.process.exitcode is None for member in self._family):
            if self._stop > told or time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(_POLL)


def answers(settings: Settings, page: str) -> bool:
    """Whether a server there answers the page with 200 within a second."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    connection = http.client.HTTPConnection(host, settings.port, timeout=1.0)
    try:
        connection.request("GET", page)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def url_of(settings: Settings) -> str:
    """Where its callers find a server."""
    host = settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].partition("retouch.serving: ")[2] or lines[-1] if lines else "see its log"


@contextmanager
def _kept_ports(host: str, first: int, count: int) -> Iterator[list[int]]:
    """So many ports, from ``first`` on, or any that are free where that is 0; kept while no replica listens there."""
    with ExitStack() as stack:
        kept = []
        for port in range(first, first + count) if first else [0] * count:
            try:
                if port:
                    _refuse_taken(host, port)
                kept.append(stack.enter_context(bound(host, port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ValueError(f"port {port} is in use; choose others with --port") from None
                raise ValueError(f"--host {host} --port {port}: {os.strerror(error.errno or 0)}") from None
        yield [each.getsockname()[1] for each in kept]


def _refuse_taken(host: str, port: int) -> None:
    """OSError where anybody is bound there; another supervisor of this user would share its port with us."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
