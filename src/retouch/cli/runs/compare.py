"""``retouch compare``."""

import argparse

from retouch.cli.arguments import RUN_HELP, Commands, debug_option, run_folder


def add_compare(commands: Commands) -> None:
    """Add the command."""
    compare = commands.add_parser(
        "compare",
        parents=[debug_option()],
        help="compare runs: held-out scores, paired differences with 95 %% intervals, and what differs in the recipes",
    )
    compare.add_argument(
        "folders", type=run_folder, nargs="+", metavar="RUN", help=f"{RUN_HELP}; the others are compared to the first"
    )
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from retouch.report.comparison import comparison

    print(comparison(arguments.folders))
    return 0
