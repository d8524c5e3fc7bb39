"""One server process, forked by the supervisor.

SIGTERM, SIGINT or the supervisor's end drain it: new requests are refused, those in hand are answered, and it exits with 0. SIGHUP
builds its rewards anew. Exit code 2: the settings are wrong, and starting again will not help.
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

from retouch.serving.app import build_app
from retouch.serving.compat import Compat
from retouch.serving.hosted import Hosted, Order, build, read_orders
from retouch.serving.limits import Limits
from retouch.serving.metrics import Metrics
from retouch.serving.service import Service

USER_ERROR = 2
_POLL = 0.02
_ORPHAN_POLL = 0.5
# So that callers and balancers see the refusals before the door closes.
_LINGER = 0.2
# A reward in plain Python lets the event loop have its turn this often, not every 5 ms.
_SWITCH = 0.001
_LOG = logging.getLogger("retouch.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a replica is told: which rewards, where to listen, how much to take, and what ``/score`` answers with."""

    rewards: Sequence[str]
    host: str
    port: int
    limits: Limits = field(default_factory=Limits)
    compat: Compat | None = None


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address. Others of this user may be bound there too, so that the supervisor can keep it for a replica."""
    # By its name: asyncio sends small writes at once only on sockets that say they are TCP, and others wait 40 ms for the caller.
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def load(settings: Settings) -> tuple[list[Order], list[Hosted]]:
    """The rewards, with their weights. ValueError where the settings are wrong."""
    orders = read_orders(settings.rewards)
    hosted = [build(order, sole=len(orders) == 1) for order in orders]
    if settings.compat is not None:
        settings.compat.check({name: None for each in hosted for name in each.columns})
    return orders, hosted


async def serve(settings: Settings, orders: Sequence[Order], hosted: Sequence[Hosted], *, token: str | None, parent: int) -> None:
    """Serve until told to stop, or until the process ``parent`` is gone."""
    service = Service(hosted, settings.limits, Metrics())
    app = build_app(service, token=token, compat=settings.compat)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=int(settings.limits.drain_seconds) + 1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound(settings.host, settings.port)]))
    while not server.started and not serving.done():
        await asyncio.sleep(_POLL)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(service.reload(orders))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    waiting = [asyncio.create_task(each) for each in (stop.wait(), _orphaned(parent), service.broken())]
    await asyncio.wait([serving, *waiting], return_when=asyncio.FIRST_COMPLETED)
    await _drain(service)
    server.should_exit = True
    await serving
    for task in waiting:
        task.cancel()


async def _drain(service: Service) -> None:
    """Refuse what is new, and wait for what is in hand."""
    service.draining = True
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() < begun + _LINGER or (not service.idle and loop.time() < begun + service.limits.drain_seconds):
        await asyncio.sleep(_POLL)


async def _orphaned(parent: int) -> None:
    """Return when the supervisor is gone."""
    while os.getppid() == parent:
        await asyncio.sleep(_ORPHAN_POLL)


def run(settings: Settings, *, log: Path, environment: Mapping[str, str], token: str | None, parent: int) -> None:
    """The body of a replica's process, which ends here: it writes to ``log`` and sees ``environment`` beside what it inherits."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # A Ctrl-C in the terminal is for the supervisor, which then tells its replicas.
    os.setpgid(0, 0)
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.setswitchinterval(_SWITCH)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    try:
        orders, hosted = load(settings)
    except ValueError as error:
        _LOG.error("%s", error)
        sys.exit(USER_ERROR)
    asyncio.run(serve(settings, orders, hosted, token=token, parent=parent))
