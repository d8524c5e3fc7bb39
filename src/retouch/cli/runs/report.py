"""``retouch report`` and ``retouch compare``."""

import argparse

from retouch.cli.arguments import RUN_HELP, Commands, debug_option, run_folder


def add_report(commands: Commands) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report",
        parents=[debug_option()],
        help="write report.html into the folder of a run, also if it was stopped or is still training",
    )
    report.add_argument("folder", type=run_folder, metavar="RUN", help=RUN_HELP)
    report.set_defaults(run=_report)


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


def _report(arguments: argparse.Namespace) -> int:
    from retouch.report.page import write_report

    print(write_report(arguments.folder))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from retouch.report.comparison import comparison

    print(comparison(arguments.folders))
    return 0
