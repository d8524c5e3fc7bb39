"""``retouch serve --engine ray``: the same endpoints as a Ray Serve deployment, for several machines.

Ray keeps the replicas running, scales their number with the load, restarts replicas that fail, and distributes requests over them
through its HTTP proxy. A replica is the application of ``app.py`` with its own queues, as without Ray.

Ray sends requests between its processes as pickles, on ports that listen on all networks: whoever can connect to these ports can
run code. A cluster that this module starts therefore accepts only connections with a token, which is generated at every start. A
cluster that is already running must be secured by its owner.
"""

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from retouch.config import consent
from retouch_serve.app import RETRY_SECONDS, error_response
from retouch_serve.hosted import parse_specs
from retouch_serve.replicas import USER_ERROR, ServerSettings, load, make_app, status_of, url_of

_NAME = "retouch"
_POLL = 0.05
_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of the Ray deployment. Ray scales between ``replicas`` and ``max_replicas`` with the load.

    ``gpus``: the number of GPUs of each replica. ``address``: the address of a running Ray cluster (``auto`` finds it); None starts
    a cluster on this machine, which ends with the command. Raises ValueError for fewer than 1 replica, or if ``max_replicas`` is
    below ``replicas``.
    """

    replicas: int
    max_replicas: int
    gpus: int
    address: str | None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"--replicas {self.replicas} and --most-replicas {self.max_replicas}: give at least 1, and a maximum not below it"
            )


class Replica:
    """A replica in Ray. It loads the rewards and builds the application."""

    def __init__(self, settings: ServerSettings, token: str | None, allow_imports: Sequence[str] = ()) -> None:
        # The processes of a running cluster do not have the command's environment, so the consent is passed as an argument.
        with consent.allowing(allow_imports):
            _, hosted = load(settings)
        self._service, self._app = make_app(settings, hosted, token=token)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    def check_health(self) -> None:
        """Raise RuntimeError if the replica must be restarted; Ray calls this method every few seconds."""
        if not self._service.working:
            raise RuntimeError("a reward's queue has stopped working")
        if self._service.stuck:
            raise RuntimeError("a call of a reward does not return")


async def draining(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that refuses every request; it replaces the replicas while they complete their requests."""
    if scope["type"] == "http":
        alive = scope["path"] == "/livez"
        response = JSONResponse({"status": "alive"}) if alive else error_response("draining", retry_after=RETRY_SECONDS)
        await response(scope, receive, send)


class DrainingReplica:
    """A replica whose application is ``draining``."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return draining


def serve(settings: ServerSettings, options: RayOptions, *, token: str | None, report: Callable[[str], None]) -> int:
    """Serve on the cluster until SIGTERM or SIGINT; returns the exit code. SIGHUP replaces the replicas one by one. ``report`` is
    called with a line for each event. Raises ValueError if a reward is unknown, or if there is no such cluster."""
    parse_specs(settings.rewards)
    allowed = tuple(consent.allowed())
    # While Ray starts, SIGTERM acts like Ctrl-C; afterwards, both signals shut the deployment down.
    with suppress(KeyboardInterrupt), _handling({signal.SIGTERM: signal.default_int_handler}), _cluster(options.address) as ray:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # Ray raises TimeoutError after a minute and continues to start its proxy in the background.
        with suppress(TimeoutError):
            ray.serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            _deploy(ray, Replica, (settings, token, allowed), **_deployment_options(settings, options))
        except RuntimeError:
            report(f"the rewards cannot be served: {_reason(ray)}")
            return USER_ERROR
        while status_of(settings, "/livez") != 200:
            time.sleep(_POLL)
        received: list[int] = []
        handlers = {
            number: lambda number, frame: received.append(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        with _handling(handlers):
            report(f"{url_of(settings)} is ready, with Ray Serve behind it")
            while signal.SIGTERM not in received and signal.SIGINT not in received:
                if received:
                    received.clear()
                    _reload(ray, settings, options, token=token, allowed=allowed, report=report)
                time.sleep(_POLL)
            _deploy(ray, DrainingReplica, (), num_replicas=1, ray_actor_options={"num_cpus": 0})
            end = time.monotonic() + settings.limits.drain_seconds
            while time.monotonic() < end:
                states = ray.serve.status().applications[_NAME].deployments[_NAME].replica_states
                if set(states) == {"RUNNING"}:
                    break
                time.sleep(_POLL)
            ray.serve.delete(_NAME)
    return 0


def _reload(
    ray: Any,
    settings: ServerSettings,
    options: RayOptions,
    *,
    token: str | None,
    allowed: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Replace the replicas one by one. If a reward cannot be built, report why, and leave the old replicas as they are.

    Ray stops a replica before its successor has started. Without GPUs, the rewards are therefore first built in a process of their
    own. With GPUs there may be none free for this process: if the rewards cannot be built then, the server has no replica until the
    next SIGHUP.
    """
    try:
        if options.gpus == 0:
            ray.get(ray.remote(num_cpus=0, max_retries=0, max_calls=1)(_build).remote(settings, allowed))
    except ray.exceptions.RayError as error:
        report(f"the rewards cannot be built again; the old ones stay in use: {str(error).strip().splitlines()[-1].strip()}")
        return
    try:
        _deploy(ray, Replica, (settings, token, allowed), **_deployment_options(settings, options))
    except RuntimeError:
        report(f"the new rewards cannot be served: {_reason(ray)}; correct them and send SIGHUP again")


def _build(settings: ServerSettings, allow_imports: Sequence[str]) -> None:
    """Build the rewards, to learn whether that is possible. Raises ValueError if it is not."""
    with consent.allowing(allow_imports):
        load(settings)


def _deployment_options(settings: ServerSettings, options: RayOptions) -> dict[str, Any]:
    """Ray's options. A replica refuses requests above its limits itself; Ray admits more, so that health checks pass."""
    limits = settings.limits
    scaling = {
        "min_replicas": options.replicas,
        "max_replicas": options.max_replicas,
        # Requests for two batches, if a client sends eight samples per request.
        "target_ongoing_requests": max(2, limits.max_batch // 4),
    }
    return {
        **({"num_replicas": options.replicas} if options.replicas == options.max_replicas else {"autoscaling_config": scaling}),
        "ray_actor_options": {"num_gpus": options.gpus, "num_cpus": 0},
        "max_ongoing_requests": 2 * limits.max_requests,
        "max_queued_requests": limits.max_requests,
        "graceful_shutdown_timeout_s": limits.drain_seconds,
    }


def _deploy(ray: Any, kind: type, arguments: tuple[Any, ...], **options: Any) -> None:
    """Replace the running replicas by replicas of this class; the old replicas complete their requests. Raises RuntimeError if no
    replica starts."""
    deployment = ray.serve.deployment(name=_NAME, max_constructor_retry_count=_TRIES, **options)(ray.serve.ingress()(kind))
    ray.serve.run(deployment.bind(*arguments), name=_NAME, route_prefix="/")


def _reason(ray: Any) -> str:
    """Why the replicas failed: their last ValueError, or Ray's whole message."""
    message: str = ray.serve.status().applications[_NAME].deployments[_NAME].message
    lines = [line.strip() for line in message.splitlines()]
    errors = [line.removeprefix("ValueError: ") for line in lines if line.startswith("ValueError: ")]
    return errors[-1] if errors else message


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Connect to the running cluster, or start a cluster for the duration of the block; yields the module ``ray``."""
    if address is None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # On a busy machine, Ray's defaults do not suffice: 5 s for the proxy to start, and workers with low priority.
        for name, value in {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"}.items():
            os.environ.setdefault(name, value)
    import ray  # reads the variables above
    import ray.serve

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except ConnectionError:
        raise ValueError(f"--ray-address {address}: no Ray cluster found; start one with `ray start --head`") from None
    try:
        yield ray
    finally:
        if address is None:
            ray.serve.shutdown()
        ray.shutdown()


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
