"""``retouch.serve``: rewards over HTTP from this process, in a thread."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch_serve.server.hosted_rewards import HostedReward
    from retouch_serve.server.request_bodies import Limits


def serve(
    *rewards: Any, host: str = "127.0.0.1", port: int = 8700, token: str | None = None, limits: Limits | None = None
) -> RewardServer:
    """Serve rewards from this process, until ``stop()`` or the end of the process.

    ``retouch serve`` also offers replicas, GPUs and logs. ``rewards``: functions, reward objects such as ``retouch.rewards.OCR()``,
    results of ``retouch.rewards.load``, or texts as on the command line of ``retouch serve``. With several rewards, the column
    names begin with the reward's name. ``port``: 0 takes a free port. ``token``: the token that clients must send, at least 16
    ASCII characters; required if other machines can reach ``host``. A client is
    ``retouch.rewards.Remote(endpoints=(server.url,))``.

    Raises ValueError if an argument is not a reward, if a reward compares the images of a task (``win_rate``, ``votes``), if a
    reward's ``name`` has other characters than letters, digits, dots, dashes and underscores, if two rewards have the same name, if
    the address cannot be used, or if the extra ``serve`` is not installed.

    Example::

        >>> with retouch.serve(brightness, port=0) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """
    from importlib.util import find_spec

    if missing := [package for package in ("fastapi", "uvicorn", "prometheus_client") if find_spec(package) is None]:
        raise ValueError(f"serving needs {missing[0]}: pip install 'retouch[serve]'")
    from retouch_serve.server.middleware import require_token
    from retouch_serve.wire.errors import is_loopback

    if not rewards:
        raise ValueError("give at least one reward")
    if token is not None:
        require_token(token)
    elif not is_loopback(host):
        raise ValueError(f"host {host} is reachable from other machines: give a token of at least 16 characters, or use 127.0.0.1")
    hosted = [_hosted(given, sole=len(rewards) == 1) for given in rewards]
    names = [each.name for each in hosted]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two rewards have the name {repeated[0]}; rename a function, or give a text with a name: 'other=ocr'")
    return RewardServer(hosted, host, port, token, limits)


def _hosted(given: Any, *, sole: bool) -> HostedReward:
    from retouch.distributed.ranks import scoring_device
    from retouch.rewards.base import RewardSection
    from retouch.rewards.function import FunctionReward
    from retouch_serve.server.hosted_rewards import HostedReward, build, fingerprint, parse_specs

    if isinstance(given, str):
        (spec,) = parse_specs([given])
        return build(spec, sole=sole)
    reward: Any = getattr(given, "reward", given)  # the result of retouch.rewards.load has the attribute
    if not isinstance(reward, RewardSection) and not hasattr(reward, "columns"):
        reward = FunctionReward.of(reward)
    section = reward.model_dump(mode="json") if isinstance(reward, RewardSection) else {}
    if isinstance(reward, RewardSection):
        reward = reward.build(device=scoring_device())
    name = str(getattr(reward, "name", None) or section.get("kind") or type(reward).__name__.lower())
    public = {column: column if sole else f"{name}/{column}" for column in reward.columns}
    return HostedReward(name, reward, public, fingerprint(section, reward))


class RewardServer:
    """A running server, returned by ``serve``. ``url``: its address, for ``retouch.rewards.Remote``.

    Raises ValueError if the port is in use, and RuntimeError if the server ends while it is starting.
    """

    def __init__(self, hosted: list[HostedReward], host: str, port: int, token: str | None, limits: Limits | None) -> None:
        import uvicorn

        from retouch_serve.front.connections import bounded_config
        from retouch_serve.server.app import build_app
        from retouch_serve.server.metrics import Metrics
        from retouch_serve.server.replica import bind
        from retouch_serve.server.request_bodies import Limits
        from retouch_serve.server.service import Service
        from retouch_serve.server.supervisor import require_free

        limits = limits or Limits()
        try:
            require_free(host, port)
            socket = bind(host, port)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"port {port} of {host}: {why}; give another port, or 0 for a free one") from None
        app = build_app(Service(hosted, limits, Metrics()), token=token, single_score=None, hosts=(host,))
        self._server = uvicorn.Server(bounded_config(app, limits))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]}, daemon=True, name="retouch.serve")
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{socket.getsockname()[1]}"
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self._server.started:
            socket.close()
            raise RuntimeError(f"the server at {self.url} ended while it was starting; the log of uvicorn.error says why")

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()

    def stop(self) -> None:
        """Finish the requests in progress and stop."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> RewardServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()
