"""The command line; ``commands/`` has what each command takes and does."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from retouch import __version__
from retouch.cli.ledger import add_ledger
from retouch.cli.looking import add_looking
from retouch.cli.preparing import add_preparing
from retouch.cli.serving import add_serving
from retouch.cli.training import add_training
from retouch.cli.using import add_using

_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 where something was found wrong, 2 where the user must change something."""
    arguments = build_parser().parse_args(argv)
    # The user's own classes (``package.module:Class``) may lie in the working folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code: int = arguments.run(arguments)
    except ValueError as error:
        if arguments.debug or not _ours(error):
            raise
        print(f"retouch {arguments.command}: {error}", file=sys.stderr)
        return _USER_ERROR
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has ``run``, the function of the command."""
    parser = argparse.ArgumentParser(
        prog="retouch", description="Reinforcement-learning post-training for image editing and generation."
    )
    parser.add_argument("--version", action="version", version=f"retouch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of a mistake that has a plain message")
    changes = argparse.ArgumentParser(add_help=False)
    changes.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="change a key of the recipe; JSON, else text"
    )
    add_training(commands, debug, changes, parse=parser.parse_args)
    add_using(commands, debug, changes)
    add_looking(commands, debug, changes)
    add_preparing(commands, debug)
    add_ledger(commands, debug)
    add_serving(commands, debug)
    return parser


def _ours(error: ValueError) -> bool:
    """Whether the error was raised by this package: a message for the user, and not a fault in what we called."""
    raised_in = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(raised_in.f_globals.get("__name__", "")).split(".")[0] == "retouch"


if __name__ == "__main__":
    sys.exit(main())
