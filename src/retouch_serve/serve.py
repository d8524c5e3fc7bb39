"""``retouch serve`` and ``retouch.serve``. What they start is in ``servers``, which is imported only when it is needed."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.cli.arguments import Commands, debug_option, import_option, integers, port

if TYPE_CHECKING:
    from retouch_serve.requests import Limits
    from retouch_serve.servers import RewardServer


def add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve", parents=[debug_option(), import_option()], help="serve rewards over HTTP, with one or more replicas"
    )
    serve.add_argument(
        "rewards",
        nargs="+",
        metavar="REWARD",
        help="[NAME=]playground, ocr, clip:FOLDER, package.module:Class, a reward section (JSON or its file), or a recipe",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); a non-local address needs a token"
    )
    serve.add_argument(
        "--allow-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name of this machine that clients without a token may use, e.g. behind a proxy",
    )
    serve.add_argument(
        "--port", type=port, default=8700, help="port of the first replica; the others use the next ports; 0 chooses free ports"
    )
    serve.add_argument("--replicas", type=int, default=1, metavar="N")
    serve.add_argument("--gpus", type=integers, metavar="1,2,3", help="CUDA devices, assigned to the replicas in turn")
    serve.add_argument(
        "--engine", choices=["own", "ray"], default="own", help="run the replicas with this command, or with Ray Serve"
    )
    serve.add_argument(
        "--most-replicas", type=int, metavar="N", help="with --engine ray: maximum number of replicas for autoscaling"
    )
    serve.add_argument(
        "--ray-address", metavar="ADDRESS", help="address of a running Ray cluster (default: start one on this machine)"
    )
    serve.add_argument(
        "--logs", type=Path, default=Path("runs/serve/logs"), metavar="DIR", help="folder for the logs, one per replica"
    )
    serve.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file that contains the token (default: the variable RETOUCH_TOKEN)"
    )
    serve.add_argument("--vlm", metavar="COLUMN", help="the column that POST /score returns as vlm_score")
    serve.add_argument("--ocr", metavar="COLUMN", help="the column that POST /score returns as ocr_confidence")
    serve.add_argument("--vlm-weight", type=float, default=1.0, metavar="W", help="weight of vlm_score in combined_score")
    serve.add_argument("--ocr-weight", type=float, default=0.0, metavar="W", help="weight of ocr_confidence in combined_score")
    serve.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        metavar="NAME=N",
        help="change a limit of the server: max_batch=64, window=0.01, max_queue=2048, ...",
    )
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    _require_packages()
    from retouch_serve.servers import serve_command

    return serve_command(arguments)


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
    _require_packages()
    from retouch_serve.servers import RewardServer

    return RewardServer(rewards, host=host, port=port, token=token, limits=limits)


def _require_packages() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"serving needs {package}: pip install 'retouch[serve]'")
