"""``retouch view``."""

import argparse
from functools import partial
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option


def add_view(commands: Commands) -> None:
    """Add the command."""
    view = commands.add_parser("view", parents=[debug_option()], help="follow runs in the browser: curves, samples, comparisons")
    view.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="RUNS_OR_RUN", help="default: runs")
    view.add_argument("--port", type=int, default=8765, help="on loopback; 0 chooses a free one")
    view.add_argument(
        "--allow-host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of this machine in the browser's address, e.g. behind a proxy",
    )
    view.set_defaults(run=_view)


def _view(arguments: argparse.Namespace) -> int:
    from retouch.view.command import view

    return view(arguments.folder, port=arguments.port, hosts=arguments.hosts, report=partial(print, flush=True))
