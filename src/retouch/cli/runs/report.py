"""``retouch report``."""

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


def _report(arguments: argparse.Namespace) -> int:
    from retouch.report.page import write_report

    print(write_report(arguments.folder))
    return 0
