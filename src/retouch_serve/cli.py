"""``retouch serve``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option, integers, port


def add_serve(commands: Commands) -> None:
    """Add the command."""
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
    from retouch_serve.server.command import serve_command

    return serve_command(arguments)
