"""Runs the replicas of a server, each with its own port, log and device, and restarts replicas that exit.

The supervisor imports everything that a replica needs, and forks, so that a restart takes only as long as loading the weights. The
supervisor itself never imports the user's code. SIGTERM shuts all replicas down; SIGHUP is forwarded to the replicas, which reload
their rewards.

On SIGTERM, on SIGINT, or when the supervisor ends, a replica refuses new requests, completes the requests in progress and exits
with code 0. Exit code 2 means that the settings are wrong, so that a restart would not help.
"""

import asyncio
import errno
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

import uvicorn

from retouch.cli.arguments import LAST_PORT
from retouch.config.keys import RedactingFormatter
from retouch.records import files
from retouch_serve.app import RequestMiddleware, build_app
from retouch_serve.front import BoundedRate, bounded_config
from retouch_serve.hosted import HostedReward, RewardSpec, build, parse_specs
from retouch_serve.http import status
from retouch_serve.requests import Limits, SingleScore
from retouch_serve.service import Service

USER_ERROR = 2
_START_POLL, _PARENT_POLL = 0.02, 0.5
_CLOSING_SECONDS = 2  # time for replies that are still being sent when the server has drained
# Python's switch interval: while a reward runs plain Python, the event loop gets its turn this often, instead of every 5 ms.
_SWITCH_SECONDS = 0.001
_POLL = 0.05
_HEALTH_SECONDS = 2.0  # between two checks of a ready replica
_STUCK_STATUS = 503  # status of /livez if a call of a reward does not return
_STUCK_SECONDS = 60.0  # without a reply, after which a replica is killed
_SHORT_LIFE = 5.0  # seconds; a replica that exits sooner is restarted after a pause
_MAX_PAUSE = 30.0
_FORK = multiprocessing.get_context("fork")
_LOG = logging.getLogger("retouch.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The rewards, the address and the limits of a server. ``single_score``: the columns of ``POST /score``; None disables it.
    ``allowed_hosts``: further host names under which clients without a token may reach the server."""

    rewards: Sequence[str]
    host: str
    port: int
    limits: Limits = field(default_factory=Limits)
    single_score: SingleScore | None = None
    allowed_hosts: Sequence[str] = ()


def url_of(settings: ServerSettings) -> str:
    """The server's URL."""
    host = settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, with SO_REUSEPORT, so that the supervisor can reserve the port for a replica."""
    # IPPROTO_TCP is explicit because asyncio sets TCP_NODELAY only on such sockets; without it small writes wait up to 40 ms.
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def load(settings: ServerSettings) -> tuple[list[RewardSpec], list[HostedReward]]:
    """Build the rewards and load their weights. Raises ValueError if the settings are wrong."""
    specs = parse_specs(settings.rewards)
    hosted = [build(spec, sole=len(specs) == 1) for spec in specs]
    if settings.single_score is not None:
        settings.single_score.check({name: None for each in hosted for name in each.columns})
    return specs, hosted


def make_app(settings: ServerSettings, hosted: Sequence[HostedReward], *, token: str | None) -> tuple[Service, RequestMiddleware]:
    """The service that scores, and its application."""
    service = Service(hosted, settings.limits)
    hosts = (settings.host, *settings.allowed_hosts)
    return service, build_app(service, token=token, single_score=settings.single_score, hosts=hosts)


def run(settings: ServerSettings, *, log: Path, environment: Mapping[str, str], token: str | None, parent: int) -> None:
    """Run a replica; the main function of its process. Output goes to ``log``; ``environment`` is added to the inherited
    variables."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C in the terminal goes to the supervisor alone, which then signals its replicas.
    os.setpgid(0, 0)
    os.environ.update(environment)
    with files.open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.setswitchinterval(_SWITCH_SECONDS)
    logging.basicConfig(level=logging.INFO, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(BoundedRate())
    try:
        specs, hosted = load(settings)
    except ValueError as error:
        _LOG.error("%s", error)
        sys.exit(USER_ERROR)
    asyncio.run(_serve_until_stopped(settings, specs, hosted, token=token, parent=parent))


async def _serve_until_stopped(
    settings: ServerSettings, specs: Sequence[RewardSpec], hosted: Sequence[HostedReward], *, token: str | None, parent: int
) -> None:
    """Serve until a signal stops the server, or until the process ``parent`` has ended."""
    service, app = make_app(settings, hosted, token=token)
    server = uvicorn.Server(bounded_config(app, settings.limits, timeout_graceful_shutdown=_CLOSING_SECONDS))
    serving = asyncio.create_task(server.serve(sockets=[bind(settings.host, settings.port)]))
    while not server.started and not serving.done():
        await asyncio.sleep(_START_POLL)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(service.reload(specs))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    async def parent_ended() -> None:
        while os.getppid() == parent:
            await asyncio.sleep(_PARENT_POLL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    waiting = [asyncio.create_task(each) for each in (stop.wait(), parent_ended(), service.wait_until_failed())]
    await asyncio.wait([serving, *waiting], return_when=asyncio.FIRST_COMPLETED)
    await service.drain()
    server.should_exit = True
    await serving
    for task in waiting:
        task.cancel()
    if service.call_seconds:
        # At exit, Python would wait for the reward's thread, which may never end.
        _LOG.warning("a call of a reward is still running; exiting without its result")
        logging.shutdown()
        os._exit(0)


# The supervisor


@dataclass(slots=True)
class _Replica:
    """A replica and its current process. All times are those of ``time.monotonic``."""

    number: int
    settings: ServerSettings
    log: Path
    gpu: int | None
    process: ForkProcess | None = None
    started: float = 0.0
    start_at: float = 0.0
    short_lives: int = 0
    ready: bool = False
    last_reply: float = 0.0
    last_check: float = 0.0


def serve(
    settings: ServerSettings,
    *,
    replicas: int,
    gpus: Sequence[int] | None,
    logs: Path,
    token: str | None,
    report: Callable[[str], None],
) -> int:
    """Run the replicas until SIGTERM or SIGINT; returns the exit code.

    ``settings.port``: the first port, or 0 for any free ports. ``gpus``: CUDA devices, assigned in turn. ``report`` is called with
    a line for each event. Raises ValueError if a reward is unknown, or a port is in use.
    """
    parse_specs(settings.rewards)
    if replicas < 1:
        raise ValueError(f"--replicas {replicas}: give at least 1")
    if settings.port + replicas - 1 > LAST_PORT:
        raise ValueError(
            f"--port {settings.port} --replicas {replicas}: the last replica's port is above {LAST_PORT}; give a lower port"
        )
    logs.mkdir(parents=True, exist_ok=True)
    with _reserved_ports(settings.host, settings.port, replicas) as ports:
        members = [
            _Replica(
                number, replace(settings, port=port), logs / f"replica-{number}.log", gpus[number % len(gpus)] if gpus else None
            )
            for number, port in enumerate(ports)
        ]
        return _Supervisor(members, token=token, report=report).run()


class _Supervisor:
    """Starts, checks and restarts the replicas. ``_stop_requests`` counts the signals that asked to stop."""

    def __init__(self, replicas: Sequence[_Replica], *, token: str | None, report: Callable[[str], None]) -> None:
        self._replicas, self._token, self._report = replicas, token, report
        self._stop_requests = 0
        self._reload = False
        self._exit_code = 0

    def run(self) -> int:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            while not self._stop_requests:
                for replica in self._replicas:
                    now, process = time.monotonic(), replica.process
                    if process is not None and process.exitcode is not None:
                        self._handle_exit(replica, process.exitcode)
                    elif process is None and now >= replica.start_at:
                        self._start(replica)
                    elif process is not None and now > replica.last_check + (_HEALTH_SECONDS if replica.ready else _POLL):
                        replica.last_check = now
                        self._check(replica)
                if self._reload:
                    self._reload = False
                    self._send(signal.SIGHUP)
                time.sleep(_POLL)
        finally:  # replicas that are left after a second signal, or after twice the drain time, are killed
            self._send(signal.SIGTERM)
            first_requests = self._stop_requests
            deadline = time.monotonic() + 2 * max(replica.settings.limits.drain_seconds for replica in self._replicas)
            while any(replica.process is not None and replica.process.exitcode is None for replica in self._replicas):
                if self._stop_requests > first_requests or time.monotonic() > deadline:
                    self._send(signal.SIGKILL)
                time.sleep(_POLL)
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._exit_code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload = True
        else:
            self._stop_requests += 1

    def _start(self, replica: _Replica) -> None:
        environment = {} if replica.gpu is None else {"CUDA_VISIBLE_DEVICES": str(replica.gpu)}
        arguments = {"log": replica.log, "environment": environment, "token": self._token, "parent": os.getpid()}
        replica.process = _FORK.Process(target=run, args=(replica.settings,), kwargs=arguments, name=f"replica-{replica.number}")
        replica.process.start()
        replica.started = replica.last_reply = time.monotonic()
        replica.ready = False
        gpu = "" if replica.gpu is None else f", GPU {replica.gpu}"
        self._report(f"replica {replica.number}: {url_of(replica.settings)}, pid {replica.process.pid}{gpu}, log {replica.log}")

    def _handle_exit(self, replica: _Replica, code: int) -> None:
        if code == USER_ERROR:
            lines = replica.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            why = lines[-1].partition("retouch.serving: ")[2] or lines[-1] if lines else "see its log"
            self._report(f"replica {replica.number} cannot start: {why}")
            self._stop_requests, self._exit_code = 1, USER_ERROR
            return
        lived = time.monotonic() - replica.started
        replica.short_lives = replica.short_lives + 1 if lived < _SHORT_LIFE else 0
        pause = min(_MAX_PAUSE, 0.1 * 2**replica.short_lives) if replica.short_lives > 1 else 0.0
        replica.process, replica.start_at = None, time.monotonic() + pause
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._report(f"replica {replica.number} exited ({how}); restarting it{f' in {pause:.1f} s' if pause else ''}")

    def _check(self, replica: _Replica) -> None:
        """Report when the replica becomes ready. Kill a ready replica if its reward is stuck or it has not replied for a minute."""
        status = status_of(replica.settings, "/livez" if replica.ready else "/readyz")
        replied = status == 200
        if replica.ready and status == _STUCK_STATUS:
            limit = replica.settings.limits.deadline_seconds
            self._kill(replica, f"has a reward that did not return within {limit:.0f} s")
        if replied and not replica.ready:
            replica.ready = True
            self._report(f"replica {replica.number} is ready")
        if replied:
            replica.last_reply = time.monotonic()
        elif replica.ready and time.monotonic() > replica.last_reply + _STUCK_SECONDS:
            self._kill(replica, f"has not replied for {_STUCK_SECONDS:.0f} s")

    def _kill(self, replica: _Replica, why: str) -> None:
        assert replica.process is not None
        self._report(f"replica {replica.number} {why}; killing it")
        replica.process.kill()
        replica.process.join()
        replica.last_reply = time.monotonic()

    def _send(self, number: signal.Signals) -> None:
        for replica in self._replicas:
            if replica.process is not None and replica.process.pid is not None and replica.process.exitcode is None:
                os.kill(replica.process.pid, number)


def status_of(settings: ServerSettings, path: str) -> int | None:
    """The status of the server's reply to GET ``path``; None if there is no reply within a second."""
    own = replace(settings, host="127.0.0.1") if settings.host in ("0.0.0.0", "::") else settings
    return status(f"{url_of(own)}{path}", seconds=1.0)


@contextmanager
def _reserved_ports(host: str, first: int, count: int) -> Iterator[list[int]]:
    """Reserve ``count`` ports for the duration of the block: consecutive ports from ``first`` on, or any free ports if it is 0."""
    with ExitStack() as stack:
        sockets = []
        for port in range(first, first + count) if first else [0] * count:
            try:
                if port:
                    require_free(host, port)
                sockets.append(stack.enter_context(bind(host, port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ValueError(f"port {port} is in use; choose another one with --port") from None
                raise ValueError(f"--host {host} --port {port}: {error.strerror or error}") from None
        yield [each.getsockname()[1] for each in sockets]


def require_free(host: str, port: int) -> None:
    """Raise OSError if the port is in use, even by another supervisor of the same user, with which SO_REUSEPORT would share it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
