"""``retouch serve --engine ray``: the same pages as a Ray Serve deployment, for who outgrows one machine.

Ray keeps the replicas, as many as were asked for or as the load asks for, starts one again that is not well, and shares requests
out among them through its HTTP proxy. A replica is the application of ``app.py`` with a queue of its own, as it is without Ray.

Ray moves requests between its own processes as pickles, and its ports listen to every network: whoever may talk to them may run
code. So a cluster that is started here talks only to who has its token, which is drawn anew each time. The ports of a cluster that
runs already are its owner's to guard.
"""

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from retouch.serving.app import RETRY_SECONDS, build_app
from retouch.serving.gate import refusal
from retouch.serving.hosted import read_orders
from retouch.serving.metrics import Metrics
from retouch.serving.replica import USER_ERROR, Settings, load
from retouch.serving.service import Service
from retouch.serving.supervisor import answers, url_of

_NAME = "retouch"
_POLL = 0.05
_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """``replicas`` to ``most``, between which Ray decides by the load. ``gpus``: of each replica. ``address``: of a Ray cluster
    that runs (``auto`` finds it); None starts one on this machine, which ends with the command.
    """

    replicas: int
    most: int
    gpus: int
    address: str | None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.most:
            raise ValueError(f"--replicas {self.replicas}, at most {self.most}: at least one, and no fewer at most than at least")


class Replica:
    """What Ray starts: it loads the rewards and builds the application."""

    def __init__(self, settings: Settings, token: str | None) -> None:
        _, hosted = load(settings)
        self._service = Service(hosted, settings.limits, Metrics())
        self._app = build_app(self._service, token=token, compat=settings.compat)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; Ray asks for it once."""
        return self._app

    def check_health(self) -> None:
        """RuntimeError where the replica must be started again; Ray asks every few seconds."""
        if not self._service.working:
            raise RuntimeError("a reward's queue has stopped working")


async def closed(scope: Scope, receive: Receive, send: Send) -> None:
    """What stands in the replicas' place while they finish what they have in hand."""
    if scope["type"] == "http":
        alive = scope["path"] == "/livez"
        answer = JSONResponse({"status": "alive"}) if alive else refusal("draining", retry_after=RETRY_SECONDS)
        await answer(scope, receive, send)


class Closed:
    """A replica that refuses everything."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application."""
        return closed


def serve(settings: Settings, fleet: Fleet, *, token: str | None, say: Callable[[str], None]) -> int:
    """Serve on the cluster until SIGTERM or SIGINT; the exit code. SIGHUP builds the rewards anew, replica by replica.

    ValueError: unknown rewards, or no such cluster.
    """
    read_orders(settings.rewards)
    # While Ray starts, a SIGTERM is a Ctrl-C; afterwards both drain.
    with suppress(KeyboardInterrupt), _handling({signal.SIGTERM: signal.default_int_handler}), _cluster(fleet.address):
        from ray import serve as ray_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # Ray waits a minute for its proxy and then goes on starting it.
        with suppress(TimeoutError):
            ray_serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            _deploy(Replica, (settings, token), **_options(settings, fleet))
        except RuntimeError:
            say(f"the rewards cannot be served: {_reason()}")
            return USER_ERROR
        while not answers(settings, "/livez"):
            time.sleep(_POLL)
        came: list[int] = []
        note = {number: lambda number, frame: came.append(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        with _handling(note):
            say(f"{url_of(settings)} is ready, with Ray Serve behind it")
            while signal.SIGTERM not in came and signal.SIGINT not in came:
                if came:
                    came.clear()
                    _deploy(Replica, (settings, token), **_options(settings, fleet))
                time.sleep(_POLL)
            _drain(settings.limits.drain_seconds)
    return 0


def _options(settings: Settings, fleet: Fleet) -> dict[str, Any]:
    """How Ray keeps the replicas. A replica refuses what is too much by itself, and answers its other pages meanwhile."""
    limits = settings.limits
    scaling = {
        "min_replicas": fleet.replicas,
        "max_replicas": fleet.most,
        # Two batches, at the eight samples that a client sends at once.
        "target_ongoing_requests": max(2, limits.max_batch // 4),
    }
    return {
        **({"num_replicas": fleet.replicas} if fleet.replicas == fleet.most else {"autoscaling_config": scaling}),
        "ray_actor_options": {"num_gpus": fleet.gpus, "num_cpus": 0},
        "max_ongoing_requests": 2 * limits.max_requests,
        "max_queued_requests": limits.max_requests,
        "graceful_shutdown_timeout_s": limits.drain_seconds,
    }


def _deploy(kind: type, arguments: tuple[Any, ...], **options: Any) -> None:
    """Put replicas of this kind in the place of those that run, which finish what they have in hand. RuntimeError: none starts."""
    from ray import serve as ray_serve

    deployment = ray_serve.deployment(name=_NAME, max_constructor_retry_count=_TRIES, **options)(ray_serve.ingress()(kind))
    ray_serve.run(deployment.bind(*arguments), name=_NAME, route_prefix="/")


def _drain(seconds: float) -> None:
    """Refuse what is new, wait for what is in hand, and take the deployment away."""
    from ray import serve as ray_serve

    _deploy(Closed, (), num_replicas=1, ray_actor_options={"num_cpus": 0})
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = ray_serve.status().applications[_NAME].deployments[_NAME].replica_states
        if set(states) == {"RUNNING"}:
            break
        time.sleep(_POLL)
    ray_serve.delete(_NAME)


def _reason() -> str:
    """What the replicas said: the last of their own error lines, or all that Ray knows."""
    from ray import serve as ray_serve

    told: str = ray_serve.status().applications[_NAME].deployments[_NAME].message
    lines = [line.strip() for line in told.splitlines()]
    own = [line.removeprefix("ValueError: ") for line in lines if line.startswith("ValueError: ")]
    return own[-1] if own else told


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """A cluster of its own, or the one that runs there."""
    if address is None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # On a busy machine Ray's own 5 s for the proxy to start, and workers that let everyone go before them, are too little.
        for name, value in {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"}.items():
            os.environ.setdefault(name, value)
    import ray
    from ray import serve as ray_serve

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except ConnectionError:
        raise ValueError(f"--ray-address {address}: no Ray cluster is there; start one with `ray start --head`") from None
    try:
        yield
    finally:
        if address is None:
            ray_serve.shutdown()
        ray.shutdown()


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Signals have these handlers while the block runs."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
