"""One server process, forked by the supervisor.

On SIGTERM, on SIGINT, or when the supervisor ends, the process refuses new requests, completes the requests in progress and exits
with code 0. On SIGHUP it reloads its rewards. Exit code 2 means that the settings are wrong, so that a restart would not help.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from retouch.config.keys import RedactingFormatter
from retouch.records import files
from retouch_serve.front.connections import BoundedRate, bounded_config
from retouch_serve.server.app import build_app
from retouch_serve.server.hosted_rewards import HostedReward, RewardSpec, build, parse_specs
from retouch_serve.server.metrics import Metrics
from retouch_serve.server.request_bodies import Limits, SingleScore
from retouch_serve.server.service import Service

USER_ERROR = 2
LAST_PORT = 65535
_POLL = 0.02
_PARENT_POLL = 0.5
_CLOSING_SECONDS = 2  # time for replies that are still being sent when the server has drained
# Minimum time in seconds for which a draining server still answers, so that clients and load balancers see its errors.
_MIN_DRAIN = 0.2
# Python's switch interval: while a reward runs plain Python, the event loop gets its turn this often, instead of every 5 ms.
_SWITCH_SECONDS = 0.001
_LOG = logging.getLogger("retouch.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The rewards, the address and the limits of a server. ``single_score``: the columns of ``POST /score``; None disables it.

    ``allowed_hosts``: further host names under which clients without a token may reach the server. Raises ValueError if ``port`` is
    no port.
    """

    rewards: Sequence[str]
    host: str
    port: int
    limits: Limits = field(default_factory=Limits)
    single_score: SingleScore | None = None
    allowed_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= LAST_PORT:
            raise ValueError(f"--port {self.port}: give a port from 0 to {LAST_PORT}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names under which clients without a token may reach the server, in addition to loopback addresses."""
        return (self.host, *self.allowed_hosts)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, with SO_REUSEPORT, so that the supervisor can reserve the port for a replica."""
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


async def serve(
    settings: ServerSettings, specs: Sequence[RewardSpec], hosted: Sequence[HostedReward], *, token: str | None, parent: int
) -> None:
    """Serve until a signal stops the server, or until the process ``parent`` has ended."""
    service = Service(hosted, settings.limits, Metrics())
    app = build_app(service, token=token, single_score=settings.single_score, hosts=settings.hosts)
    server = uvicorn.Server(bounded_config(app, settings.limits, timeout_graceful_shutdown=_CLOSING_SECONDS))
    serving = asyncio.create_task(server.serve(sockets=[bind(settings.host, settings.port)]))
    while not server.started and not serving.done():
        await asyncio.sleep(_POLL)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(service.reload(specs))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    waiting = [asyncio.create_task(each) for each in (stop.wait(), _parent_ended(parent), service.wait_until_failed())]
    await asyncio.wait([serving, *waiting], return_when=asyncio.FIRST_COMPLETED)
    await _drain(service)
    server.should_exit = True
    await serving
    for task in waiting:
        task.cancel()
    if service.scoring:
        # At exit, Python would wait for the reward's thread, which may never end.
        _LOG.warning("a call of a reward is still running; exiting without its result")
        logging.shutdown()
        os._exit(0)


async def _drain(service: Service) -> None:
    """Refuse new requests, and wait for the requests in progress, at most ``drain_seconds``."""
    service.draining = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() < began + _MIN_DRAIN or (not service.idle and loop.time() < began + service.limits.drain_seconds):
        await asyncio.sleep(_POLL)


async def _parent_ended(parent: int) -> None:
    """Return when the supervisor has ended."""
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_POLL)


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
    asyncio.run(serve(settings, specs, hosted, token=token, parent=parent))
