"""The command ``retouch serve``: checks the arguments, and starts the supervisor or Ray Serve."""

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.config.imports import did_you_mean

if TYPE_CHECKING:
    from retouch_serve.server.replica import ServerSettings

TOKEN = "RETOUCH_TOKEN"


def serve_command(arguments: argparse.Namespace) -> int:
    """Serve until a signal stops the server; returns the exit code.

    Raises ValueError if the arguments are wrong, or if the extra ``serve`` is not installed.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"serving needs {package}: pip install 'retouch[serve]'")
    from retouch_serve.server.replica import ServerSettings
    from retouch_serve.server.request_bodies import Limits, SingleScore
    from retouch_serve.server.supervisor import serve
    from retouch_serve.wire.errors import is_loopback

    single_score = None
    if arguments.vlm is not None:
        weights = {"vlm_weight": arguments.vlm_weight, "ocr_weight": arguments.ocr_weight}
        single_score = SingleScore(vlm=arguments.vlm, ocr=arguments.ocr, **weights)
    elif arguments.ocr is not None:
        raise ValueError("--ocr needs --vlm COLUMN too: POST /score always returns a vlm_score")
    kinds = {each.name: each.type for each in dataclasses.fields(Limits)}
    limits = dataclasses.replace(Limits(), **read_limits(arguments.limits, kinds))
    settings = ServerSettings(
        rewards=tuple(arguments.rewards),
        host=arguments.host,
        port=arguments.port,
        limits=limits,
        single_score=single_score,
        allowed_hosts=tuple(arguments.allowed_hosts),
    )
    token = read_token(arguments.token_file)
    if not is_loopback(settings.host) and token is None:
        raise ValueError(
            f"--host {settings.host} is reachable from other machines: set RETOUCH_TOKEN or --token-file, or use 127.0.0.1"
        )
    if arguments.gpus is not None and arguments.ray_address is None:
        from retouch.distributed.launching import require_gpus

        require_gpus(arguments.gpus)
    if arguments.engine == "ray":
        return _serve_with_ray(settings, arguments, token)
    if arguments.most_replicas is not None or arguments.ray_address is not None:
        raise ValueError("--most-replicas and --ray-address need --engine ray")
    return serve(settings, replicas=arguments.replicas, gpus=arguments.gpus, logs=arguments.logs, token=token, report=_print_line)


def _serve_with_ray(settings: "ServerSettings", arguments: argparse.Namespace, token: str | None) -> int:
    if importlib.util.find_spec("ray") is None:
        raise ValueError("--engine ray needs Ray Serve: pip install 'retouch[ray]'")
    from retouch_serve.server.ray_engine import RayOptions, serve

    if settings.port == 0:
        raise ValueError("--port 0: with --engine ray, give the port of its proxy")
    if arguments.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, arguments.gpus))
    options = RayOptions(
        replicas=arguments.replicas,
        max_replicas=arguments.replicas if arguments.most_replicas is None else arguments.most_replicas,
        gpus=0 if arguments.gpus is None else 1,
        address=arguments.ray_address,
    )
    return serve(settings, options, token=token, report=_print_line)


def read_limits(words: Sequence[str], kinds: dict[str, object]) -> dict[str, Any]:
    """Parse texts ``NAME=N`` to arguments of ``Limits``. ``kinds``: the type of each limit.

    Raises ValueError if a name is unknown, or a value is not a number.
    """
    limits: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ValueError(f"--limit {word}: there is no limit {name!r}{did_you_mean(name, kinds)}")
        try:
            limits[name] = int(text) if kinds[name] is int else float(text)
        except ValueError:
            raise ValueError(f"--limit {word}: {name} must be a {'whole ' if kinds[name] is int else ''}number") from None
    return limits


def read_token(file: Path | None) -> str | None:
    """Read the token from the file or from the environment, and remove it from the environment.

    Raises ValueError if the token is too short or has other characters than printable ASCII, or if the file does not exist.
    """
    from retouch_serve.server.middleware import require_token

    given = os.environ.pop(TOKEN, None)
    if file is not None:
        if not file.is_file():
            raise ValueError(f"--token-file {file}: no such file")
        given = file.read_text(encoding="utf-8").strip()
    if given is not None:
        require_token(given)
    return given


def _print_line(line: str) -> None:
    """Print a line to standard output, without buffering."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
