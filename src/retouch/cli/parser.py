"""The parser of all commands, and ``main``, which runs one of them."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from retouch import __version__
from retouch.cli.data import add_data
from retouch.cli.doctor import add_doctor
from retouch.cli.eval import add_eval
from retouch.cli.export import add_export
from retouch.cli.launch import add_launch
from retouch.cli.ledger import add_ledger
from retouch.cli.playground import add_playground
from retouch.cli.recipes import add_recipes
from retouch.cli.sample import add_sample
from retouch.cli.score import add_score
from retouch.cli.serve import add_serve
from retouch.cli.train import add_train

_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 1 if it found a problem, 2 for a mistake of the user."""
    arguments = build_parser().parse_args(argv)
    # A user's own classes (``package.module:Class``) may be in the working directory.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code: int = arguments.run(arguments)
    except ValueError as error:
        if arguments.debug or not _is_user_error(error):
            raise
        print(f"retouch {arguments.command}: {error}", file=sys.stderr)
        return _USER_ERROR
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the namespace it returns has ``run``, the function of the command."""
    parser = argparse.ArgumentParser(
        prog="retouch", description="Reinforcement-learning post-training for image editing and generation."
    )
    parser.add_argument("--version", action="version", version=f"retouch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train(commands)
    add_launch(commands, parse=parser.parse_args)
    for add in (
        add_eval,
        add_sample,
        add_score,
        add_export,
        add_doctor,
        add_recipes,
        add_playground,
        add_data,
        add_ledger,
        add_serve,
    ):
        add(commands)
    return parser


def _is_user_error(error: ValueError) -> bool:
    """Whether this package raised the error, so that its message is for the user, and not a library that we called."""
    raised_in = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(raised_in.f_globals.get("__name__", "")).split(".")[0] == "retouch"
