"""Starts servers: with the arguments of ``retouch serve``, or in a thread of the caller's process for ``retouch.serve``."""

import argparse
import dataclasses
import importlib.util
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn

from retouch.config import keys
from retouch.config.imports import did_you_mean
from retouch.distributed.launching import require_gpus
from retouch_serve import replicas
from retouch_serve.app import require_token
from retouch_serve.front import bounded_config
from retouch_serve.hosted import host_reward
from retouch_serve.replicas import ServerSettings
from retouch_serve.requests import Limits, SingleScore
from retouch_serve.wire import is_loopback


def serve_command(arguments: argparse.Namespace) -> int:
    """Serve until a signal stops the server; returns the exit code. Raises ValueError if the arguments are wrong."""
    single_score = None
    if arguments.vlm is not None:
        weights = {"vlm_weight": arguments.vlm_weight, "ocr_weight": arguments.ocr_weight}
        single_score = SingleScore(vlm=arguments.vlm, ocr=arguments.ocr, **weights)
    elif arguments.ocr is not None:
        raise ValueError("--ocr needs --vlm COLUMN too: POST /score always returns a vlm_score")
    settings = ServerSettings(
        rewards=tuple(arguments.rewards),
        host=arguments.host,
        port=arguments.port,
        limits=_limits(arguments.limits),
        single_score=single_score,
        allowed_hosts=tuple(arguments.allowed_hosts),
    )
    token = os.environ.pop(keys.TOKEN, None)
    if arguments.token_file is not None:
        if not arguments.token_file.is_file():
            raise ValueError(f"--token-file {arguments.token_file}: no such file")
        token = arguments.token_file.read_text(encoding="utf-8").strip()
    if token is not None:
        require_token(token)
    if not is_loopback(settings.host) and token is None:
        raise ValueError(
            f"--host {settings.host} is reachable from other machines: set RETOUCH_TOKEN or --token-file, or use 127.0.0.1"
        )
    gpus, report = arguments.gpus, partial(print, flush=True)
    if gpus is not None and arguments.ray_address is None:
        require_gpus(gpus)
    if arguments.engine != "ray":
        if arguments.most_replicas is not None or arguments.ray_address is not None:
            raise ValueError("--most-replicas and --ray-address need --engine ray")
        return replicas.serve(settings, replicas=arguments.replicas, gpus=gpus, logs=arguments.logs, token=token, report=report)
    if importlib.util.find_spec("ray") is None:
        raise ValueError("--engine ray needs Ray Serve: pip install 'retouch[ray]'")
    from retouch_serve import ray_engine

    if settings.port == 0:
        raise ValueError("--port 0: with --engine ray, give the port of its proxy")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    options = ray_engine.RayOptions(
        replicas=arguments.replicas,
        max_replicas=arguments.replicas if arguments.most_replicas is None else arguments.most_replicas,
        gpus=0 if gpus is None else 1,
        address=arguments.ray_address,
    )
    return ray_engine.serve(settings, options, token=token, report=report)


def _limits(words: Sequence[str]) -> Limits:
    kinds = {each.name: each.type for each in dataclasses.fields(Limits)}
    limits: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ValueError(f"--limit {word}: there is no limit {name!r}{did_you_mean(name, kinds)}")
        try:
            limits[name] = int(text) if kinds[name] is int else float(text)
        except ValueError:
            raise ValueError(f"--limit {word}: {name} must be a {'whole ' if kinds[name] is int else ''}number") from None
    return Limits(**limits)


class RewardServer:
    """A running server, returned by ``retouch.serve``. ``url``: its address, for ``retouch.rewards.Remote``. Raises ValueError for
    wrong arguments, or if the port is in use, and RuntimeError if the server ends while it is starting."""

    def __init__(self, rewards: Sequence[Any], *, host: str, port: int, token: str | None, limits: Limits | None) -> None:
        if not rewards:
            raise ValueError("give at least one reward")
        if token is not None:
            require_token(token)
        elif not is_loopback(host):
            raise ValueError(
                f"host {host} is reachable from other machines: give a token of at least 16 characters, or use 127.0.0.1"
            )
        hosted = [host_reward(given, sole=len(rewards) == 1) for given in rewards]
        names = [each.name for each in hosted]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two rewards have the name {repeated[0]}; rename a function, or give a text with a name: 'other=ocr'")
        settings = ServerSettings(rewards=(), host=host, port=port, limits=limits or Limits())
        try:
            replicas.require_free(host, port)
            socket = replicas.bind(host, port)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"port {port} of {host}: {why}; give another port, or 0 for a free one") from None
        _, app = replicas.make_app(settings, hosted, token=token)
        self._server = uvicorn.Server(bounded_config(app, settings.limits))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]}, daemon=True, name="retouch.serve")
        self.url = replicas.url_of(dataclasses.replace(settings, port=socket.getsockname()[1]))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()
